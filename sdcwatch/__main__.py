"""``python -m sdcwatch``."""

from sdcwatch.cli import main

if __name__ == "__main__":
    main()
