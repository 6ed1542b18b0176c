"""May this commit run on machines of ours? Decides for `.github/workflows/gpu.yml`, from the base's checkout.

A label says go, but not for which commit: somebody may push while it is being given. A review names its commit. So code
from a fork runs when somebody who may write gave the label, and somebody who may write has reviewed that very commit.
Only the standard library is needed: nothing is installed where this runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAY_WRITE = ("admin", "write")
PAGE = 100
PATIENCE = 30.0

Get = Callable[[str], Any]
"""The JSON of a path of the API."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Whether `sha` may run, and why or why not."""

    approved: bool
    sha: str
    why: str


def decide(name: str, event: Mapping[str, Any], sha: str, label: str, get: Get) -> Decision:
    """About an event of that name; `sha` is the commit of one that is no pull request's."""
    if name != "pull_request_target":
        return Decision(True, sha, f"{name}: a commit of this repository")
    pull = event["pull_request"]
    head = str(pull["head"]["sha"])
    repository = event["repository"]["full_name"]
    if event["action"] != "labeled":
        origin = pull["head"]["repo"] or {}
        if origin.get("full_name") == repository and pull["user"]["type"] != "Bot":
            return Decision(True, head, "a branch of this repository: who pushes to it may write")
        return Decision(False, head, f"review {head}, then give the label {label}: it counts for that commit alone")
    if event["label"]["name"] != label:
        return Decision(False, head, f"the label {event['label']['name']!r} is another one")
    giver = event["sender"]["login"]
    if not _may_write(repository, giver, get):
        return Decision(False, head, f"{giver} may not write to this repository, so their label opens nothing")
    place = f"repos/{repository}/pulls/{int(pull['number'])}"
    if get(place)["head"]["sha"] != head:
        return Decision(False, head, f"{head} is not the head any more; review the new one and give the label again")
    for reviewer in _reviewers(place, head, get):
        if _may_write(repository, reviewer, get):
            return Decision(True, head, f"labelled by {giver}, reviewed at this commit by {reviewer}")
    return Decision(False, head, f"nobody who may write has reviewed {head}; review it, then give the label again")


def _may_write(repository: str, login: str, get: Get) -> bool:
    found = get(f"repos/{repository}/collaborators/{urllib.parse.quote(login, safe='')}/permission")
    return found["permission"] in MAY_WRITE


def _reviewers(place: str, sha: str, get: Get) -> Iterable[str]:
    """Who has a review of that commit that asks for no changes, each once."""
    last: dict[str, Mapping[str, Any]] = {}
    page = 1
    while True:
        reviews = get(f"{place}/reviews?per_page={PAGE}&page={page}")
        for review in reviews:
            if review["user"] and review["commit_id"] == sha:
                last[review["user"]["login"]] = review
        if len(reviews) < PAGE:
            return [login for login, review in last.items() if review["state"] in ("APPROVED", "COMMENTED")]
        page += 1


def api(url: str, token: str) -> Get:
    """Reads the API. Raises SystemExit naming what was refused."""

    def get(path: str) -> Any:
        headers = {"Authorization": f"Bearer {token}", "Accept": "application/vnd.github+json"}
        try:
            with urllib.request.urlopen(
                urllib.request.Request(f"{url}/{path}", headers=headers), timeout=PATIENCE
            ) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404 and path.endswith("/permission"):
                return {"permission": "none"}
            raise SystemExit(f"{path}: the API answers {error.code} {error.reason}; nothing is approved") from error
        except OSError as error:
            raise SystemExit(f"{path}: {error}; nothing is approved") from error

    return get


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--label", required=True, help="the label that approves")
    options = parser.parse_args()
    event = json.loads(Path(os.environ["GITHUB_EVENT_PATH"]).read_text(encoding="utf-8"))
    get = api(os.environ["GITHUB_API_URL"], os.environ["GITHUB_TOKEN"])
    decision = decide(os.environ["GITHUB_EVENT_NAME"], event, os.environ["GITHUB_SHA"], options.label, get)
    with Path(os.environ["GITHUB_OUTPUT"]).open("a", encoding="utf-8") as out:
        out.write(f"approved={str(decision.approved).lower()}\nsha={decision.sha}\n")
    print(("approved: " if decision.approved else "not approved: ") + repr(decision.why))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
