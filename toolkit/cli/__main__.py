"""`python -m toolkit.cli`: the same as `tandem`."""

from toolkit.cli.main import main

if __name__ == "__main__":
    main()
