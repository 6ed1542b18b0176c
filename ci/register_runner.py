"""`draftproof ci register-runner`: a GitHub Actions runner that takes one job and is gone."""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import psutil
import typer

from ci import credentials, leftovers, runners
from ci.github import DEFAULT_GROUP, DEFAULT_GROUP_ID, DEFAULT_URL, GitHub, GitHubError, JitRequest, Scope, checked_url
from ci.registration import Record, RecordFile, Stop, Stopped, record_of, recover, registered

TOKEN_VARIABLE = "GITHUB_TOKEN"
JIT_VARIABLE = "ACTIONS_RUNNER_INPUT_JITCONFIG"
"""The runner takes its inputs from variables of this prefix, too, and removes them before it starts a job. Arguments
are for everybody to see, in the process list."""
PASSED_ON = frozenset(
    (
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH"),
        *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "CUDA_HOME", "CUDA_PATH", "CUDA_CACHE_PATH"),
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_DRIVER_CAPABILITIES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"),
        *("RUNNER_ALLOW_RUNASROOT", "RUNNER_TOOL_CACHE", "RUNNER_WAIT_FOR_DOCKER_IN_SECONDS", "DOTNET_ROOT"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "ALL_PROXY"),
    )
)
"""Nothing else of this environment reaches a job, which may be anybody's code, save LC_*; proxies go in small letters,
too."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9-]{0,38}")
_REPOSITORY = re.compile(r"([A-Za-z0-9][A-Za-z0-9-]{0,38})/([A-Za-z0-9._-]{1,100})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`grace`: seconds that a runner gets to give its job back when this process is asked to stop. `gpu_wait`: seconds
    that GPU memory may take to come back."""

    scope: Scope
    group: str
    name: str
    labels: tuple[str, ...]
    runner_dir: Path
    work_folder: str
    user: str
    pass_env: tuple[str, ...]
    grace: float
    gpu_wait: float

    def request(self, group_id: int) -> JitRequest:
        return JitRequest(
            name=self.name, runner_group_id=group_id, labels=self.labels, work_folder=f"{self.work_folder}/{self.name}"
        )


def register_runner(
    runner_dir: Annotated[Path, typer.Option(help="Folder of an unpacked runner release, with run.sh.")],
    repo: Annotated[str, typer.Option(help="OWNER/NAME of the repository whose jobs it takes; or --org.")] = "",
    org: Annotated[str, typer.Option(help="Organisation whose jobs it takes; or --repo.")] = "",
    group: Annotated[str, typer.Option(help="Runner group.")] = DEFAULT_GROUP,
    only: Annotated[
        list[str] | None, typer.Option("--class", help="Only this class of those that it satisfies; repeatable.")
    ] = None,
    label: Annotated[
        list[str] | None, typer.Option(help="These labels, instead of those of the classes; repeatable.")
    ] = None,
    name: Annotated[str, typer.Option(help="Default: the host's name and a random suffix.")] = "",
    token_file: Annotated[
        Path | None, typer.Option(help=f"File of mode 0600 with the token. Default: the variable {TOKEN_VARIABLE}.")
    ] = None,
    api_url: Annotated[str, typer.Option(help="https://HOST/api/v3 of a GitHub Enterprise server.")] = DEFAULT_URL,
    user: Annotated[str, typer.Option(help="Run the runner as this user; takes root.")] = "",
    pass_env: Annotated[list[str] | None, typer.Option(help="Variable that jobs may see, too; repeatable.")] = None,
    work_folder: Annotated[str, typer.Option(help="In the runner's folder; each runner gets its own in it.")] = "_work",
    grace: Annotated[float, typer.Option(min=0, help="Seconds for a job to end when this is stopped.")] = 30.0,
    gpu_wait: Annotated[float, typer.Option(min=0, help="Seconds for GPU memory to come back.")] = 30.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the request, and send nothing.")] = False,
) -> None:
    """Register an ephemeral GitHub Actions runner, run it for one job, and clean up behind it. Exits 1 when something
    failed or stayed behind, and with 128 + the signal that stopped it."""
    plan = Plan(
        scope=_scope(repo, org),
        group=group,
        name=_checked_name(name or f"{socket.gethostname()[:40]}-{secrets.token_hex(4)}"),
        labels=_labels(label or (), only or ()),
        runner_dir=_checked_runner(runner_dir),
        work_folder=_checked_folder(work_folder),
        user=user,
        pass_env=tuple(pass_env or ()),
        grace=grace,
        gpu_wait=gpu_wait,
    )
    if dry_run:
        typer.echo(_dry(plan, checked_url(api_url)))
        return
    token = _token_source(token_file)
    credentials.hide_memory()
    leftovers.adopt_orphans()
    github = GitHub(api_url, token)
    try:
        code = run(plan, github, token(), typer.echo)
    except GitHubError as error:
        typer.echo(f"error: {error}", err=True)
        code = 1
    finally:
        github.close()
    raise typer.Exit(code)


def _scope(repo: str, org: str) -> Scope:
    if bool(repo) == bool(org):
        raise ValueError("give either --repo OWNER/NAME or --org NAME")
    if org:
        if not _OWNER.fullmatch(org):
            raise ValueError(f"--org {org}: must be the name of an organisation, without a path")
        return Scope(org)
    match = _REPOSITORY.fullmatch(repo)
    if match is None:
        raise ValueError(f"--repo {repo}: must be OWNER/NAME")
    return Scope(match[1], match[2])


def _checked_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(f"--name {name}: must be 1 to 64 letters, digits, dots, dashes and underscores")
    return name


def _checked_folder(folder: str) -> str:
    if not _NAME.fullmatch(folder.removeprefix("_")):
        raise ValueError(f"--work-folder {folder}: must be the name of one folder, such as _work")
    return folder


def _checked_runner(folder: Path) -> Path:
    program = folder / "run.sh"
    if not os.access(program, os.X_OK):
        raise ValueError(f"--runner-dir {folder}: has no run.sh that can be executed; unpack a runner release there")
    return folder.resolve()


def _labels(given: Sequence[str], only: Sequence[str]) -> tuple[str, ...]:
    if given and only:
        raise ValueError("give either --label or --class")
    if given:
        return _checked_labels(tuple(dict.fromkeys(("self-hosted", *given))))
    from ci.doctor import detect, unmet

    classes, machine = runners.load(), detect()
    for name in only:
        if name not in classes or classes[name].hosted:
            known = ", ".join(one.name for one in classes.values() if not one.hosted)
            raise ValueError(f"--class {name}: must be one of {known}")
        reasons = unmet(machine, classes[name])
        if reasons:
            raise ValueError(f"--class {name}: this machine is not of it: {'; '.join(reasons)}")
    return labels_of([one for one in classes.values() if not unmet(machine, one)], only)


def labels_of(satisfied: Iterable[runners.RunnerClass], only: Sequence[str] = ()) -> tuple[str, ...]:
    """Those of all self-hosted classes that a machine satisfies, or of those in `only`. Raises ValueError for none."""
    found = dict.fromkeys(
        label for one in satisfied if not one.hosted and (not only or one.name in only) for label in one.labels
    )
    if not found:
        raise ValueError(
            "this machine satisfies no self-hosted class, and `draftproof ci doctor` says why; mend that, or give "
            "--label"
        )
    return _checked_labels(tuple(found))


def _checked_labels(labels: tuple[str, ...]) -> tuple[str, ...]:
    for label in labels:
        if not label or len(label) > 256 or "," in label or not label.isprintable():
            raise ValueError(f"--label {label!r}: must be printable, without a comma")
    return labels


def _token_source(path: Path | None) -> Callable[[], str]:
    """A file is read for every request: tokens of a GitHub App are replaced every hour."""
    if path is not None:
        return lambda: credentials.from_file(path)
    token = credentials.from_environment(TOKEN_VARIABLE)
    return lambda: token


def _dry(plan: Plan, url: str) -> str:
    known = plan.scope.repository and plan.group == DEFAULT_GROUP
    body = msgspec.to_builtins(plan.request(DEFAULT_GROUP_ID))
    if not known:
        body["runner_group_id"] = f"the id of group {plan.group}, which is looked up"
    where = f"{url}{plan.scope.path}/actions/runners/generate-jitconfig"
    return json.dumps({"method": "POST", "url": where, "body": body}, indent=1)


def run(plan: Plan, github: GitHub, token: str, tell: Callable[[str], None]) -> int:
    """Register, run, clean up -> the exit code. Raises GitHubError and ValueError before the runner has started."""
    stop = Stop()
    with stop.watching(), record_of(plan.runner_dir) as file:
        environment = child_environment(plan, os.environ, token)
        try:
            recover(github, plan.scope, file, tell)
            request = plan.request(github.group_id(plan.scope, plan.group))
            with registered(github, plan.scope, request, file, stop, tell) as runner:
                tell(f"runner {runner.name} is registered for the {plan.scope}: {', '.join(plan.labels)}")
                fine = _one_job(plan, {**environment, JIT_VARIABLE: runner.configuration}, file, stop, tell)
        except Stopped:
            fine = True
        if stop.signal:
            tell(f"stopped by {signal.Signals(stop.signal).name}")
            return 128 + stop.signal
        return 0 if fine else 1


def _one_job(
    plan: Plan, environment: Mapping[str, str], file: RecordFile, stop: Stop, tell: Callable[[str], None]
) -> bool:
    """Run the program to its end and clean up -> whether all went well."""
    before, spared = _memory(tell), leftovers.descendants()
    program: subprocess.Popen[bytes] | None = None
    code = 0
    try:
        # Held: between its start and the record of it no signal may come.
        stop.held = True
        program = start_program(plan, environment)
        file.write(_record(plan, program.pid))
        stop.held = bool(stop.signal)
        if stop.signal:
            raise Stopped
        code = program.wait()
    finally:
        stop.held = True
        if program is not None:
            _stop(program, plan.grace)
        clean = clean_up(plan, before, spared, tell)
    if code:
        tell(f"the runner ended with exit code {code}; its log is in {plan.runner_dir / '_diag'}")
    return clean and not code


def start_program(plan: Plan, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """run.sh in a session of its own, as the user of the plan. Raises ValueError when it does not start."""
    identity: dict[str, int | list[int]] = {}
    if plan.user:
        entry = _account(plan.user)
        groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
        identity = {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
    try:
        return subprocess.Popen(  # type: ignore[no-any-return]  # keywords of two types
            [plan.runner_dir / "run.sh"],
            cwd=plan.runner_dir,
            env=environment,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            **identity,  # type: ignore[call-overload]  # keywords of two types
        )
    except OSError as error:
        raise ValueError(f"--runner-dir {plan.runner_dir}: run.sh could not be started: {error.strerror}") from error


def _record(plan: Plan, pid: int) -> Record:
    return Record(name=plan.name, scope=str(plan.scope), pid=pid, started=psutil.Process(pid).create_time())


def _account(user: str) -> pwd.struct_passwd:
    if os.geteuid() != 0:
        raise ValueError(f"--user {user}: only root can start a runner as another user")
    try:
        return pwd.getpwnam(user)
    except KeyError as error:
        raise ValueError(f"--user {user}: there is no such user") from error


def child_environment(plan: Plan, environment: Mapping[str, str], token: str) -> dict[str, str]:
    """What the runner and its jobs see. Raises ValueError where the token would be among it."""
    passed = {
        name: value
        for name, value in environment.items()
        if name.upper() in PASSED_ON or name.startswith("LC_") or (name in plan.pass_env and name != TOKEN_VARIABLE)
    }
    for name, value in passed.items():
        if token in value:
            raise ValueError(f"the variable {name} holds the token, and jobs would see it; unset it")
    if plan.user:
        entry = _account(plan.user)
        passed |= {"HOME": entry.pw_dir, "USER": entry.pw_name, "LOGNAME": entry.pw_name}
    # With the second one run.sh hands SIGTERM on to the runner, which then gives its job back.
    return {**passed, leftovers.MARK: plan.name, "RUNNER_MANUALLY_TRAP_SIG": "1"}


def _stop(program: subprocess.Popen[bytes], grace: float) -> None:
    if program.poll() is None:
        program.terminate()
        try:
            program.wait(grace)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


def _memory(tell: Callable[[str], None]) -> leftovers.GpuMemory | None:
    try:
        return leftovers.gpu_memory()
    except leftovers.NoGpu as error:
        tell(f"GPU memory is not watched: {error}")
        return None


def clean_up(
    plan: Plan,
    before: leftovers.GpuMemory | None,
    spared: set[psutil.Process],
    tell: Callable[[str], None],
) -> bool:
    """End what the job left running, see that GPU memory came back, and remove the work folder -> whether nothing is
    left."""
    result = leftovers.end_descendants(spared)
    if result.ended:
        tell(f"ended what the job left running: {', '.join(result.ended)}")
    if result.alive:
        tell(f"could not end what the job left running: {', '.join(result.alive)}; end it before the next job")
    return _memory_is_back(before, plan.gpu_wait, tell) & _work_is_removed(plan, tell) and not result.alive


def _memory_is_back(before: leftovers.GpuMemory | None, patience: float, tell: Callable[[str], None]) -> bool:
    if before is None:
        return True
    started = time.monotonic()
    try:
        missing = leftovers.missing_memory(before, patience)
    except leftovers.NoGpu as error:
        missing = [f"the GPUs do not answer after the job: {error}"]
    for sentence in missing:
        tell(sentence)
    if not missing:
        tell(f"GPU memory came back within {time.monotonic() - started:.1f} s")
    return not missing


def _work_is_removed(plan: Plan, tell: Callable[[str], None]) -> bool:
    """Only a folder of this runner's name, really inside of the runner's own."""
    folder = plan.runner_dir / plan.work_folder / plan.name
    if not folder.is_dir():
        return True
    if folder.resolve() != folder:
        tell(f"{folder} leads elsewhere and was left; look at it before the next job")
        return False
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        tell(f"{folder} could not be removed; files of containers may belong to root")
    return not folder.exists()
