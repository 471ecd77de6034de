"""Keep a cluster's namespaces alive until standard input ends; see the note in ``bench.cluster.netns``."""

import signal
import sys

if __name__ == "__main__":
    # The first process of its namespace inherits the daemons that launchers leave: the kernel shall reap them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    print("ready", flush=True)
    sys.stdin.read()
