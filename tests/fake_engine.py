"""Programs that stand in for other engines: they serve nothing but their health, late."""

import json
from pathlib import Path

_PROGRAM = """
import http.server, json, os, signal, subprocess, sys, threading, time
from pathlib import Path

SETTINGS = json.loads(os.environ["FAKE_ENGINE"])
record = {"arguments": sys.argv[1:], "key": os.environ.get("VLLM_API_KEY"), "signals": []}

def write():
    # The health's thread and a signal's handler write too.
    part = Path(f"{SETTINGS['record']}.{threading.get_ident()}")
    part.write_text(json.dumps(record))
    part.replace(SETTINGS["record"])

def receive(number, frame):
    record["signals"].append(signal.Signals(number).name)
    write()
    if not SETTINGS.get("is_stubborn"):
        os._exit(SETTINGS.get("status", 0))

class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_ready = self.path == "/health" and time.monotonic() > start + SETTINGS.get("delay", 0)
        record["num_questions"] = record.get("num_questions", 0) + 1
        write()
        self.send_response(200 if is_ready else 503)
        self.end_headers()

    def log_message(self, *arguments):
        pass

start = time.monotonic()
for number in (signal.SIGTERM, signal.SIGINT):
    signal.signal(number, receive)
print("the engine's own words", flush=True)
record["worker"] = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid
write()
if "early_status" in SETTINGS:
    os._exit(SETTINGS["early_status"])
port = int(sys.argv[sys.argv.index("--port") + 1])
server = http.server.HTTPServer(("127.0.0.1", port), Health)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True:
    time.sleep(0.05)  # a pause would not end by a signal that comes just before it
"""

_ENTRIES = ("vllm/entrypoints/openai/api_server.py", "sglang/launch_server.py")


class FakeEngine:
    """Packages named vllm and sglang in a folder, and what their program wrote down.

    settings: `delay` in seconds until it is healthy, `early_status` to end with before that,
    `status` to end with when it is told to, `is_stubborn` if it does not end then.
    """

    def __init__(self, folder: Path, **settings: object) -> None:
        self._record = folder / "record.json"
        for entry in _ENTRIES:
            path = folder / entry
            path.parent.mkdir(parents=True)
            path.write_text(_PROGRAM, encoding="utf-8")
            for parent in path.relative_to(folder).parents:
                if parent.name:
                    (folder / parent / "__init__.py").touch()
        self.environment = {
            "PYTHONPATH": str(folder),
            "FAKE_ENGINE": json.dumps({"record": str(self._record), **settings}),
        }

    def record(self) -> dict:
        """Its arguments, the key that it sees, the signals that came; empty before it starts."""
        if not self._record.exists():
            return {}
        return json.loads(self._record.read_text(encoding="utf-8"))
