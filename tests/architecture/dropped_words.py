"""Words that nobody would type into a search box, which graphrt no longer says, and their count."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

FOLDERS = ("src", "tests", "docs", "examples", "benchmarks")
NAMES_THEM = "tests/architecture/"

# Where a word means what was dropped: the start of a path, as an expression.
LIBRARY = "src/graphrt/"
SIMULATED = "src/graphrt/device/simulated/"
ABOVE_DEVICES = "src/graphrt/(?:graphs|runner|runtime)/"
# Engines compare logits, which lie a gap apart.
NO_LOGITS = "(?!.*(?:_llm|demo|engines))|.*/attention/"
CALLERS = "tests|examples|benchmarks"
# Classes have slots of their own, which `__slots__` declares.
NO_CLASSES = "src/graphrt/(?!externals/(?:host_snapshot|reachable|places))"


class Word:
    """A word, the expression that finds it, and where it means what was dropped.

    ``parts``: without one of them in the text there is nothing to find, which is seen sooner.
    """

    def __init__(self, said: str, pattern: str, where: str = "", parts: str = "") -> None:
        self.said = said
        self._pattern = re.compile(pattern)
        self._where = re.compile(where)
        self._parts = parts.split("|")

    def count(self, text: str, place: str) -> int:
        if not any(part in text for part in self._parts) or not self._where.match(place):
            return 0
        return len(self._pattern.findall(text))


def part(words: str, where: str = "") -> Word:
    """A word of prose, or of a name such as ``run_gap`` or ``_gap``."""
    return Word(words.split("|")[0], rf"(?<![A-Za-z])(?:{words})(?![A-Za-z])", where, words)


def named(words: str, where: str = "") -> Word:
    """A whole name."""
    return Word(words.split("|")[0], rf"\b(?:{words})\b", where, words)


def phrase(words: str) -> Word:
    """A phrase, which a line of a comment may break."""
    return Word(words, r"\b" + words.replace(" ", r"[\s#]+") + r"\b", parts=words.split()[0])


# The left column of the rename table, in its order, then phrases. What is an English word too
# counts where it names the thing that was renamed: in some folders, or beside what only code has.
WORDS = [
    Word("gap", r"(?<![A-Za-z])(?<!without.a.)[Gg]aps?(?![A-Za-z])", NO_LOGITS),
    Word("window", r"(?<![A-Za-z])(?<!sliding.)[Ww]indows?(?![A-Za-z]| paths)"),
    Word("External", r"\bExternal\b(?! [a-z])"),
    named("ExternalUse"),
    named("Sighting|Sightings"),
    Word("slot", r"(?<![A-Za-z])(?<!__)slots?(?![A-Za-z=]|__|_mapping)", NO_CLASSES),
    part("destination|Destination", LIBRARY),
    Word("Ambient", r"[Aa]mbient"),
    named("CaptureTerms"),
    Word("FailureBook", r"FailureBook|failure_book"),
    part("fuse", "(?!docs)"),  # Compilers fuse.
    named("CaptureFuseError"),
    Word("admit", r"(?<![A-Za-z])admi(?:t|ts|tted|ssions?)(?![A-Za-z])", LIBRARY),
    Word("admit()", r"\.admit\(", CALLERS),
    named("Admissions"),
    part("reject|rejected|rejects", LIBRARY),
    Word("refuse()", r"(?<![\w.])refuse\("),
    Word("refusals.py", r"(?<![A-Za-z])refusals(?![A-Za-z])|refusal_of"),
    Word("Why", r"\bWhy\b(?=[(),:\]]| \|)"),
    part("wishes|wish"),
    named("MissReason"),
    Word("unpublished", r"[Uu]npublished"),
    Word("left, own", r"priority\.(?:left|own)\b|\bdef (?:left|own)\b|self\._own\b", LIBRARY),
    named("strangers"),
    Word("counted()", r"(?<![\w.])counted\("),
    Word("excluded()", r"(?<![\w.])excluded\("),
    Word("live", r"(?<![\w\"])live(?=[:=)(]|, )|\.live\b", ABOVE_DEVICES),
    Word("take()", r"\.take\(|\bdef take\b"),
    named("_Term"),
    Word("lease", r"\b[Ll]eas(?:e|es|ed)\b"),
    Word("tails", r"(?<![A-Za-z])(?:tails|Tails?)(?![a-z])", LIBRARY),
    Word("soil", r"(?<![A-Za-z])soil"),
    named("_settled"),
    part("sinks"),
    Word(
        "holds",
        r"(?<!device)(?<!pools)\.holds\b(?!\()|self\._holds\b|\bholds(?==|: )|[\"`]holds[\"`]",
    ),
    named("CollectorPause"),
    named("old_heap_aside"),
    Word("collection.py", r"graphs[./]collection\b"),
    part("answering"),
    part("speakers"),
    part("cuda_query"),
    Word("HostState", r"HostState|hoststate"),
    part("picture|pictures"),
    Word("reinstated", r"\breinstate"),
    part("twin|twins|Twin", LIBRARY),
    Word("see()", r"(?<![A-Za-z])see\(", SIMULATED),
    part("baked|bakes|bake", SIMULATED),
    part("ledger|Ledger"),
    Word("touch(), make()", r"ledger\.(?:touch|make)\(|\bdef (?:touch|make)\b", LIBRARY),
    named("Capturer"),
    Word("Steps", r"\bSteps\b(?=[(),:.\]`]| \|)", LIBRARY),
    Word("Launch", r"\bLaunch\b(?=[(),:.\]`]| \|)", LIBRARY),
    named("_Ticker"),
    named("_Parts"),
    named("KEEP"),
    named("ZERO"),
    named("SENTINEL"),
    named("FILL_ONCE"),
    part("seats|seat|Seats"),
    part("flights"),
    part("landed"),
    Word("telling.py", r"demo[./_]telling\b"),
    Word("preparing.py", r"demo[./_]preparing\b"),
    Word("comparing.py", r"demo[./_]comparing\b"),
    Word("answers.py", r"cli[./]answers\b|cli import answers\b"),
    phrase("is no news"),
    phrase("stands in"),
    phrase("to be told of"),
    phrase("comes again"),
    phrase("is what is left"),
    phrase("serves no step"),
    phrase("what became of"),
    phrase("cope with"),
    phrase("copes with"),
    part("aside"),
    phrase("nobody's"),
]


def count_words(repository: Path) -> Counter[str]:
    """Return how often each word is said in Python and Markdown files, their names included.

    The folder of this file is left out, because it has to name them.
    """
    counts: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in sorted((repository / folder).rglob("*")):
            place = path.relative_to(repository).as_posix()
            if path.suffix not in {".py", ".md"} or place.startswith(NAMES_THEM):
                continue
            text = f"{place}\n{path.read_text(encoding='utf-8')}"
            for word in WORDS:
                counts[word.said] += word.count(text, place)
    return +counts
