"""The process of one side: `python -m benches.side WHO FOLDER CORES`, then one JSON line per command on stdin.

Both AReno and this project are packages called `areno`: whose it is, is decided by FOLDER before anything is imported.
"""

from __future__ import annotations

import json
import os
import sys


def main() -> None:
    who, folder, cores = sys.argv[1], sys.argv[2], int(sys.argv[3])
    sys.path.insert(0, folder)
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    # Whatever a side prints must not get between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    from benches.contenders import make_contender

    contender = make_contender(who)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        print(json.dumps(getattr(contender, command)(**arguments)), file=answers, flush=True)


if __name__ == "__main__":
    main()
