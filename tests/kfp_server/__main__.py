"""The contract server by itself: `python -m tests.kfp_server [PORT]`, ended by ^C or SIGTERM."""

import signal
import sys

from tests.kfp_server.server import serving

port = int(sys.argv[1]) if len(sys.argv) > 1 else 8888
ends = [signal.SIGINT, signal.SIGTERM]
signal.pthread_sigmask(signal.SIG_BLOCK, ends)
with serving(("0.0.0.0", port)):
    print(f"a KFP API server alone: KFP_DDP_HOST=http://localhost:{port}", flush=True)
    signal.sigwait(ends)
