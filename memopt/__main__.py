"""`python -m memopt`: the same as the command `memopt`."""

from memopt.cli import main

if __name__ == "__main__":
    main()
