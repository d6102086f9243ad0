"""``python -m qwen35rt COMMAND``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
