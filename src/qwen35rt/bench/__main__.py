"""``python -m qwen35rt.bench``: the same as ``qwen35rt bench``."""

import sys

from ..cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))
