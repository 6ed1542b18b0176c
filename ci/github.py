"""The part of GitHub's REST API that registers runners. Every refusal becomes a sentence that says what to do."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec
from tenacity import RetryCallState, Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

DEFAULT_URL = "https://api.github.com"
API_VERSION = "2022-11-28"
TIMEOUT = httpx.Timeout(30.0, connect=10.0)
ATTEMPTS = 4
LONGEST_WAIT = 90.0
"""Seconds that a rate limit may ask for and get; a longer one is told instead."""
DEFAULT_GROUP = "Default"
DEFAULT_GROUP_ID = 1
PAGE = 100
MAX_PAGES = 100

Answer = TypeVar("Answer")
log = logging.getLogger(__name__)


class GitHubError(RuntimeError):
    """A sentence for the user. `status` is that of the answer, None without one. `ambiguous`: the request may have been
    carried out. `wait`: seconds after which it may be sent again, None for never."""

    def __init__(
        self, sentence: str, *, status: int | None = None, ambiguous: bool = False, wait: float | None = None
    ) -> None:
        super().__init__(sentence)
        self.status, self.ambiguous, self.wait = status, ambiguous, wait


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose runners: a repository, or an organisation where `repository` is empty."""

    owner: str
    repository: str = ""

    @property
    def path(self) -> str:
        owner = quote(self.owner, safe="")
        return f"/repos/{owner}/{quote(self.repository, safe='')}" if self.repository else f"/orgs/{owner}"

    @property
    def permission(self) -> str:
        if self.repository:
            return 'the permission "Administration: write" on it (classic tokens: the scope "repo")'
        return 'the permission "Self-hosted runners: write" in it (classic tokens: the scope "admin:org")'

    def __str__(self) -> str:
        return f"repository {self.owner}/{self.repository}" if self.repository else f"organisation {self.owner}"


class JitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What a just-in-time configuration is asked for. `work_folder` is relative to that of the runner."""

    name: str
    runner_group_id: int
    labels: tuple[str, ...]
    work_folder: str


class Runner(msgspec.Struct, frozen=True, kw_only=True):
    id: int
    name: str
    status: str = "offline"
    busy: bool = False


class _Group(msgspec.Struct, frozen=True):
    id: int
    name: str


class _Groups(msgspec.Struct, frozen=True):
    total_count: int
    runner_groups: tuple[_Group, ...]


class _Runners(msgspec.Struct, frozen=True):
    total_count: int
    runners: tuple[Runner, ...]


class _JitConfiguration(msgspec.Struct, frozen=True):
    runner: Runner
    encoded_jit_config: Annotated[str, msgspec.Meta(min_length=1)]


@dataclass(frozen=True, slots=True)
class JitRunner:
    """A runner that is registered and has not run yet. `configuration` is a credential."""

    id: int
    name: str
    configuration: str = field(repr=False)


def checked_url(url: str) -> str:
    """The URL without a slash at its end. Raises ValueError unless it is https, or leads to this machine."""
    parts = urlsplit(url)
    if not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
        raise ValueError(f"--api-url: write it as {DEFAULT_URL}, or https://HOST/api/v3 of a GitHub Enterprise server")
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts.hostname)):
        raise ValueError(f"--api-url {url}: must begin with https://, since a token is sent there")
    return url.rstrip("/")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class GitHub:
    """`token` is called for every request, so that a token which is replaced during a long job is followed. `pause` is
    the shortest time in seconds before a request is repeated."""

    def __init__(self, url: str, token: Callable[[], str], pause: float = 1.0) -> None:
        self.url = checked_url(url)
        self._token, self._pause = token, pause
        parts = urlsplit(self.url)
        # A proxy does not lead to this machine, and certificates take their time to load.
        remote, secure = not _is_loopback(parts.hostname or ""), parts.scheme == "https"
        self._client = httpx.Client(base_url=self.url, timeout=TIMEOUT, trust_env=remote, verify=secure)

    def close(self) -> None:
        self._client.close()

    def group_id(self, scope: Scope, name: str) -> int:
        """A repository outside of an organisation has the default group alone, whose id is known."""
        if scope.repository and name == DEFAULT_GROUP:
            return DEFAULT_GROUP_ID
        query = {"visible_to_repository": scope.repository} if scope.repository else {}
        path = f"{Scope(scope.owner).path}/actions/runner-groups"
        what = f"list the runner groups of {scope.owner}"
        names = []
        for page in self._pages(path, query, Scope(scope.owner), what, _Groups):
            for group in page.runner_groups:
                if group.name == name:
                    return group.id
                names.append(group.name)
        known = ", ".join(sorted(names)) or "none"
        raise GitHubError(f"--group {name}: {scope} has no such runner group; it has: {known}")

    def find_runner(self, scope: Scope, name: str) -> Runner | None:
        path, what = f"{scope.path}/actions/runners", f"list the runners of {scope}"
        for page in self._pages(path, {"name": name}, scope, what, _Runners):
            for runner in page.runners:
                if runner.name == name:
                    return runner
        return None

    def generate_jit_configuration(self, scope: Scope, request: JitRequest) -> JitRunner:
        path, what = f"{scope.path}/actions/runners/generate-jitconfig", f"register runner {request.name} for {scope}"
        answer = self._ask("POST", path, scope, what, body=msgspec.to_builtins(request))
        made = self._decoded(answer, what, _JitConfiguration)
        return JitRunner(made.runner.id, made.runner.name, made.encoded_jit_config)

    def remove_runner(self, scope: Scope, runner: int) -> bool:
        """Whether it was still registered."""
        try:
            self._ask("DELETE", f"{scope.path}/actions/runners/{runner}", scope, f"remove runner {runner} of {scope}")
        except GitHubError as error:
            if error.status == httpx.codes.NOT_FOUND:
                return False
            raise
        return True

    def _pages(
        self, path: str, query: dict[str, str], scope: Scope, what: str, shape: type[Answer]
    ) -> Iterator[Answer]:
        for page in range(1, MAX_PAGES + 1):
            numbered = {**query, "per_page": str(PAGE), "page": str(page)}
            answer = self._decoded(self._ask("GET", path, scope, what, query=numbered), what, shape)
            yield answer
            if page * PAGE >= getattr(answer, "total_count", 0):
                return

    def _ask(
        self,
        method: str,
        path: str,
        scope: Scope,
        what: str,
        *,
        body: Any = None,
        query: dict[str, str] | None = None,
    ) -> httpx.Response:
        again = Retrying(
            retry=retry_if_exception(lambda error: isinstance(error, GitHubError) and _is_soon(error)),
            wait=self._until_again,
            stop=stop_after_attempt(ATTEMPTS),
            before_sleep=_say,
            reraise=True,
        )
        return again(self._ask_once, method, path, scope, what, body, query)

    def _until_again(self, state: RetryCallState) -> float:
        asked = state.outcome.exception() if state.outcome else None
        told = asked.wait if isinstance(asked, GitHubError) and asked.wait else 0.0
        return max(told, wait_random_exponential(self._pause, max=30.0, min=self._pause)(state))

    def _ask_once(
        self, method: str, path: str, scope: Scope, what: str, body: Any, query: dict[str, str] | None
    ) -> httpx.Response:
        token = self._token()
        headers = {
            "Accept": "application/vnd.github+json",
            "Authorization": f"Bearer {token}",
            "X-GitHub-Api-Version": API_VERSION,
            "User-Agent": "draftproof",
        }
        try:
            answer = self._client.request(method, path, json=body, params=query, headers=headers)
        except httpx.HTTPError as error:
            unsent = isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout, httpx.ProxyError))
            repeatable = unsent or method != "POST"
            raise GitHubError(
                f"could not {what}: {self.url} does not answer ({_words(error, token)}); check the network, the proxy "
                "variables and --api-url",
                ambiguous=not unsent,
                wait=0.0 if repeatable else None,
            ) from None
        if not answer.is_success:
            raise _refusal(answer, scope, what, token, repeatable=method != "POST")
        return answer

    def _decoded(self, answer: httpx.Response, what: str, shape: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(answer.content, type=shape)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise GitHubError(
                f"could not {what}: the answer is not what GitHub sends ({error}); is {self.url} the API of a GitHub "
                "server, and is no proxy in between? GitHub Enterprise has it at https://HOST/api/v3",
                status=answer.status_code,
                ambiguous=True,
            ) from None


def _is_soon(error: GitHubError) -> bool:
    return error.wait is not None and error.wait <= LONGEST_WAIT


def _say(state: RetryCallState) -> None:
    asked = state.outcome.exception() if state.outcome else None
    log.warning("%s; trying again in %.0f s", asked, state.upcoming_sleep)


def _refusal(answer: httpx.Response, scope: Scope, what: str, token: str, *, repeatable: bool) -> GitHubError:
    """What an answer other than 2xx means."""
    status, said = answer.status_code, _message(answer, token)
    limit = _rate_limit(answer, said)
    if limit is not None:
        when = time.strftime("%H:%M:%S UTC", time.gmtime(time.time() + limit))
        return GitHubError(
            f"could not {what}: GitHub's rate limit is reached{said}; try again in {limit:.0f} seconds, after {when}",
            status=status,
            wait=limit,
        )
    failed = status >= httpx.codes.INTERNAL_SERVER_ERROR
    return GitHubError(
        f"could not {what}: {_mend(answer, scope)}{said}",
        status=status,
        ambiguous=failed,
        wait=0.0 if failed and repeatable else None,
    )


def _mend(answer: httpx.Response, scope: Scope) -> str:
    match answer.status_code:
        case 401:
            return "GitHub does not accept the token (401): mistyped, revoked or expired; make a new one"
        case 403 if "required" in answer.headers.get("X-GitHub-SSO", ""):
            return "the token is not authorised for single sign-on (403); authorise it in its settings on GitHub"
        case 403:
            return f"the token may not do that for the {scope} (403); give it {scope.permission}"
        case 404:
            return (
                f"GitHub shows this token no {scope}, or no such runner or group in it (404); check the spelling, and "
                f"give the token {scope.permission}"
            )
        case 409:
            return "a runner of that name is there already (409); choose another --name, or remove the old runner"
        case 422:
            return "GitHub does not accept the request (422); mend the field that it names"
        case 301 | 302 | 307 | 308:
            return f"the {scope} has moved ({answer.status_code}); give its new name"
        case status if status >= 500:
            return f"GitHub has failed ({status}); try again later, and see its status page"
        case status:
            return f"GitHub answered {status}; check --api-url"


def _rate_limit(answer: httpx.Response, said: str) -> float | None:
    """Seconds until the limit is lifted, None where it is another refusal."""
    if answer.status_code not in (403, 429):
        return None
    headers = answer.headers
    after, reset = headers.get("Retry-After", ""), headers.get("X-RateLimit-Reset", "")
    if after.isdigit():
        return float(after)
    if headers.get("X-RateLimit-Remaining") == "0" and reset.isdigit():
        return max(0.0, float(reset) - time.time())
    # GitHub asks for a minute where it does not say how long.
    return 60.0 if answer.status_code == 429 or "secondary rate limit" in said.lower() else None


def _message(answer: httpx.Response, token: str) -> str:
    """What GitHub says itself, as `: "..."`; empty where the body is not one of its own."""
    try:
        body = msgspec.json.decode(answer.content)
    except msgspec.DecodeError:
        return ""
    if not isinstance(body, dict) or not isinstance(body.get("message"), str):
        return ""
    told = [body["message"], *_field_errors(body.get("errors"))]
    return f': "{_words("; ".join(told), token)}"'


def _field_errors(errors: Any) -> Iterator[str]:
    for error in errors if isinstance(errors, list) else ():
        if isinstance(error, dict):
            yield " ".join(str(error[key]) for key in ("field", "code", "message") if error.get(key))
        else:
            yield str(error)


def _words(text: object, token: str) -> str:
    """One line of a foreign text, without the token."""
    line = " ".join(str(text).replace(token, "***").split())
    return "".join(one for one in line if one.isprintable())[:300]
