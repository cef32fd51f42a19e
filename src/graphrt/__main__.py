"""``python -m graphrt`` is the ``graphrt`` script."""

from graphrt.cli import main

if __name__ == "__main__":
    main()
