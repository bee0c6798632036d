"""A server that is healthy after a moment: `python server.py PORT REDUNDANT [dies|ends]`; a child outlasts a SIGINT."""

import http.server
import subprocess
import sys
import threading


class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()

    def do_POST(self):  # a workload that the server does not survive
        threading.Thread(target=self.server.shutdown).start()
        self.send_response(200)
        self.end_headers()


if "dies" in sys.argv:
    sys.exit("no such model")
print(f"redundant experts: {sys.argv[2]}", flush=True)
child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(300)"
subprocess.Popen([sys.executable, "-c", child])
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
