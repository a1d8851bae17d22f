"""Check the executors of the cluster. The argument is the store: a URL or a folder.

It prints a table by host, and exits with status 1 if there is a problem.
"""

import sys

from hvd_estimators.__main__ import main

sys.exit(main(["doctor", "--cluster", "--store", *sys.argv[1:]]))
