"""`python -m kvpool.cli`, for use when the script is not on the path."""

from kvpool.cli import main

main()
