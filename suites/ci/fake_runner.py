"""The runner's program as a script: it writes down what it was given, and leaves processes behind as jobs do."""

from __future__ import annotations

import json
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = """#!{python}
import base64, json, os, signal, subprocess, sys, time, urllib.request
from pathlib import Path

here = Path(__file__).parent
how = json.loads((here / "how.json").read_text())
jit = os.environ.pop("ACTIONS_RUNNER_INPUT_JITCONFIG")
number = int(base64.b64decode(jit).decode().rpartition("-")[2])
if "exit" in how:
    sys.exit(how["exit"])
(here / how["work"]).mkdir(parents=True)
(here / how["work"] / "checkout").write_text("left by the job")
own = {{"start_new_session": True, "stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}}
deaf = ["sh", "-c", "trap '' TERM; sleep 600 & wait; wait"]
left = [
    subprocess.Popen(deaf if how["deaf"] else ["sleep", "600"], **own).pid,
    subprocess.Popen(["sleep", "600"], env={{}}, **own).pid,
]
if how["gpu_mib"]:
    Path(how["gpu"]).write_text(json.dumps({{"pid": left[1], "mib": how["gpu_mib"], "stays": how["gpu_stays"]}}))
if how["job"]:
    urllib.request.urlopen(f"{{how['url']}}/job-done/{{number}}").close()
time.sleep(0.2)
seen = {{"arguments": sys.argv[1:], "jit": jit, "environment": dict(os.environ), "left": left, "pid": os.getpid(),
        "user": os.getuid(), "session": os.getsid(0)}}
(here / "seen.json.part").write_text(json.dumps(seen))
(here / "seen.json.part").rename(here / "seen.json")
print("Listening for Jobs", flush=True)
while how["wait"]:
    time.sleep(0.05)
"""

NVIDIA_SMI = """#!{python}
import json, os, sys
from pathlib import Path

# 400 MiB are in use whatever happens; a neighbour uses 1000 MiB once the job runs.
state = Path(__file__).with_name("gpu.json")
job = json.loads(state.read_text()) if state.exists() else None
lives = job is not None and os.path.exists(f"/proc/{{job['pid']}}")
mine = job["mib"] if lives else 0
orphaned = job["mib"] if job is not None and not lives and job["stays"] else 0
neighbour = 1000 if job is not None else 0
if Path(__file__).with_name("broken").exists():
    sys.exit("NVIDIA-SMI has failed because it could not communicate with the driver")
if sys.argv[1].startswith("--query-gpu"):
    print(f"GPU-0, {{400 + mine + orphaned + neighbour}}")
else:
    for pid, mib in ((job and job["pid"], mine), (1, neighbour)):
        if mib:
            print(f"{{pid}}, GPU-0, {{mib}}")
"""


@dataclass(frozen=True)
class FakeRunner:
    """`folder` is what --runner-dir gets."""

    folder: Path
    how: dict[str, Any]

    @classmethod
    def make(cls, folder: Path, url: str, name: str, **how: Any) -> FakeRunner:
        folder.mkdir()
        script(folder / "run.sh", PROGRAM)
        usual = {"job": True, "wait": False, "deaf": False}
        gpu = {"gpu_mib": 0, "gpu_stays": False, "gpu": str(folder.parent / "gpu.json")}
        made = cls(folder, {**usual, **gpu, "url": url, "work": f"_work/{name}", **how})
        (folder / "how.json").write_text(json.dumps(made.how))
        return made

    @property
    def seen(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "seen.json").read_text()))


def script(path: Path, text: str) -> None:
    path.write_text(text.format(python=sys.executable))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
