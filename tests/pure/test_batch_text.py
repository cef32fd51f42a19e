"""How a key reads in a message."""

from __future__ import annotations

from hypothesis import given, strategies as st

from graphrt.batch import BatchDescriptor


def test_only_what_differs_from_the_defaults_is_told() -> None:
    assert repr(BatchDescriptor(4)) == "BatchDescriptor(num_tokens=4)"
    told = "BatchDescriptor(num_tokens=8, num_reqs=8, uniform=True)"
    assert str(BatchDescriptor(8, 8, uniform=True)) == told


@given(
    st.builds(
        BatchDescriptor,
        st.integers(0, 9),
        st.none() | st.integers(0, 9),
        st.booleans(),
        st.booleans(),
        st.integers(0, 3),
        st.integers(1, 2),
        st.none() | st.text(max_size=3),
    )
)
def test_the_text_is_an_expression_that_makes_the_key_again(key: BatchDescriptor) -> None:
    assert eval(repr(key)) == key
