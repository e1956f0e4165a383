"""`python -m prism`, for torchrun and for machines where scripts are not on the path."""

import sys

from prism.cli import main

if __name__ == "__main__":
    sys.exit(main())
