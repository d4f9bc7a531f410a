"""`on_success` and `on_failure`: what is called after a run, with which JSON, and that a hook changes nothing of the run."""

import base64
import json
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lakeupsert.cli import hooks, main
from tests.harness.processes import wait_until

TABLE = """
[tables.sales]
landing = "landing"
processed = "processed"
key = ["id"]
partition_by = ["day"]
order_by = ["ts"]
"""


@pytest.fixture
def lake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("landing").mkdir()
    Path("landing/a.csv").write_text("id,day,ts\na,2020-01-01,2020-02-01\n")
    return tmp_path


def configure(on_success: object = None, on_failure: object = None, table: str = TABLE) -> None:
    lines = [
        f"{name} = {json.dumps(hook)}\n"
        for name, hook in (("on_success", on_success), ("on_failure", on_failure))
        if hook
    ]
    Path("lakeupsert.toml").write_text("".join(lines) + table)


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["run", "--json", *args])


def script(name: str, body: str) -> str:
    path = Path(name)
    path.write_text(f"#!{sys.executable}\nimport json, os, sys, time\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return f"./{name}"


SAVE = "open(sys.argv[1], 'w').write(sys.stdin.read())"


def refuse_the_batch() -> None:
    Path("landing/b.csv").write_text("id,day,ts\n" + ",,\n" * 20)


# ---------------------------------------------------------------- commands


def test_command_gets_the_object_of_the_run(lake: Path) -> None:
    save = script("save.py", SAVE)
    configure([save, "success.json"], [save, "failure.json"])
    done = run()
    assert done.exit_code == 0, done.output
    assert json.loads(Path("success.json").read_text()) == json.loads(done.stdout)
    assert not Path("failure.json").exists()
    Path("success.json").unlink()
    refuse_the_batch()
    failed = run()
    assert failed.exit_code == 1
    told = json.loads(Path("failure.json").read_text())
    assert told == json.loads(failed.stdout)
    assert (told["exit_code"], told["error"]["code"]) == (1, "quarantine-limit")
    assert not Path("success.json").exists()


def test_people_get_their_text_and_the_hook_its_json(lake: Path) -> None:
    configure([script("save.py", SAVE), "success.json"])
    done = CliRunner().invoke(main, ["run"])
    assert "Table sales" in done.stdout
    assert json.loads(Path("success.json").read_text())["command"] == "run"


def test_other_commands_dry_runs_and_unread_configurations_call_nothing(lake: Path) -> None:
    save = script("save.py", SAVE)
    configure([save, "hook.json"], [save, "hook.json"])
    for args in (["append"], ["status"], ["run", "--dry-run"], ["run", "--nonsense"]):
        CliRunner().invoke(main, args)
    assert not Path("hook.json").exists()


def test_run_that_can_not_even_open_its_table_calls_the_hook(lake: Path) -> None:
    Path("landing/a.csv").unlink()
    Path("landing").rmdir()
    configure(on_failure=[script("save.py", SAVE), "failure.json"])
    assert run().exit_code == 2
    assert json.loads(Path("failure.json").read_text())["error"]["code"] == "no-landing"


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("print('first'); sys.exit('no such channel')", "exit code 1: no such channel"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("print('x' * 10_000_000); sys.exit(3)", "exit code 3"),
        ("sys.stdin.close(); sys.exit(4)", "exit code 4"),
    ],
)
def test_command_that_fails_is_a_warning(lake: Path, body: str, reason: str) -> None:
    configure([script("hook.py", body)])
    done = run()
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["result"]["publish"]["rows"] == 1
    [warning] = found["warnings"]
    assert "on_success" in warning
    assert reason in warning


@pytest.mark.parametrize("program", ["./absent.py", "no-such-program", "./landing/a.csv", "a\0b"])
def test_command_that_can_not_be_started_is_a_warning(lake: Path, program: str) -> None:
    configure([program])
    done = run()
    assert done.exit_code == 0, done.output
    [warning] = json.loads(done.stdout)["warnings"]
    assert program.removeprefix("./") in warning


def test_failed_hook_does_not_hide_the_exit_code_of_a_failed_run(lake: Path) -> None:
    refuse_the_batch()
    configure(on_failure=["no-such-program"])
    failed = run()
    assert failed.exit_code == 1
    found = json.loads(failed.stdout)
    assert found["error"]["code"] == "quarantine-limit"
    assert len(found["warnings"]) == 1


def test_command_that_hangs_is_killed_with_what_it_started(lake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hooks, "HOOK_SECONDS", 2.0)
    configure(["sh", "-c", "sleep 600 & echo $! > pid; wait"])
    done = run()
    assert done.exit_code == 0, done.output
    [warning] = json.loads(done.stdout)["warnings"]
    assert "2 seconds" in warning
    wait_until(lambda: not is_running(int(Path("pid").read_text())), "the end of the hook's child")


def is_running(pid: int) -> bool:
    """Not a zombie either, which nobody may have reaped yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.long
def test_sigterm_ends_the_hook_and_not_the_answer(lake: Path) -> None:
    configure([script("hook.py", "open('begun', 'w').write('1'); time.sleep(600)")])
    program = [sys.executable, "-c", "from lakeupsert.cli import main; main()", "run", "--json"]
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: Path("begun").exists(), "the begin of the hook")
        process.send_signal(signal.SIGTERM)
        stdout, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    found = json.loads(stdout)
    assert found["result"]["publish"]["rows"] == 1
    assert "killed" in found["warnings"][0]


# ---------------------------------------------------------------- webhooks


class Service(ThreadingHTTPServer):
    """Answers every request with ``status`` and remembers it."""

    def __init__(self) -> None:
        self.status, self.bodies, self.paths = 200, [], []  # type: ignore[var-annotated]
        self.reason: str | None = None
        self.authorization: str | None = None
        self.released = threading.Event()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        self.server.paths.append(self.path)
        self.server.authorization = self.headers["Authorization"]
        self.server.bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 0:
            self.server.released.wait(60)
            return
        self.send_response(self.server.status, self.server.reason)
        if self.server.status == 302:
            self.send_header("Location", f"{self.server.address}/elsewhere")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def do_GET(self) -> None:
        self.server.paths.append(f"GET {self.path}")
        self.send_response(200)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service() -> Iterator[Service]:
    with Service() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.released.set()
        server.shutdown()
        thread.join()


def test_address_gets_the_object_by_post(lake: Path, service: Service) -> None:
    configure(f"{service.address}/good", f"{service.address}/bad")
    done = run()
    assert done.exit_code == 0, done.output
    assert json.loads(service.bodies[-1]) == json.loads(done.stdout)
    refuse_the_batch()
    failed = run()
    assert json.loads(service.bodies[-1]) == json.loads(failed.stdout)
    assert service.paths == ["/good", "/bad"]


@pytest.mark.parametrize("status", [302, 404, 500])
def test_answer_other_than_success_is_a_warning(lake: Path, service: Service, status: int) -> None:
    service.status = status
    configure(service.address)
    done = run()
    assert done.exit_code == 0, done.output
    [warning] = json.loads(done.stdout)["warnings"]
    assert str(status) in warning
    assert service.paths == [""] or service.paths == ["/"], "a redirection is not followed: the object would be lost"


def test_service_that_does_not_answer_is_a_warning(
    lake: Path, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hooks, "HOOK_SECONDS", 1.0)
    service.status = 0
    configure(service.address)
    done = run()
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["warnings"]) == 1
    port = service.server_port
    service.shutdown()
    service.server_close()
    configure(f"http://127.0.0.1:{port}")
    assert len(json.loads(run().stdout)["warnings"]) == 1, "nobody listens there"


def test_address_may_have_a_user_and_a_password(lake: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORD", "hunter%402")
    configure(service.address.replace("//", "//me:${WORD}@") + "/in")
    done = run()
    assert json.loads(done.stdout)["warnings"] == []
    assert service.paths == ["/in"]
    assert service.authorization == "Basic " + base64.b64encode(b"me:hunter@2").decode()


def test_secrets_of_an_address_are_in_no_output(lake: Path, service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    service.status, service.reason = 500, "no channel hunter2"
    monkeypatch.setenv("PAGER_URL", f"{service.address}/hunter2?token=hunter2")
    monkeypatch.setenv("PAGER_TOKEN", "hunter2")
    configure("${PAGER_URL}", [script("tell.py", "sys.exit(sys.argv[1])"), "${PAGER_TOKEN}"])
    done = run()
    assert len(json.loads(done.stdout)["warnings"]) == 1
    assert service.paths == ["/hunter2?token=hunter2"]
    refuse_the_batch()
    failed = run()
    [warning] = json.loads(failed.stdout)["warnings"]
    assert "${PAGER_TOKEN}" in warning
    outputs = [done.output, failed.output, *(CliRunner().invoke(main, ["config", *j]).output for j in ([], ["--json"]))]
    assert "PAGER_TOKEN" in outputs[-1]
    assert not any("hunter2" in text for text in outputs)
    configure("https://pager.example/hunter2")
    assert "hunter2" not in CliRunner().invoke(main, ["config"]).output


@pytest.mark.parametrize("hook", ["https://pager.example/${NOBODY}", ["notify", "${NOBODY}"]])
def test_a_variable_of_a_hook_that_is_not_set_stops_runs_only(lake: Path, hook: object) -> None:
    """Whoever looks at the table at night may not have the pager's address."""
    configure(on_failure=hook)
    refused = run()
    assert refused.exit_code == 2
    assert json.loads(refused.stdout)["error"]["code"] == "unset-variable"
    assert not (lake / "processed").exists()
    assert run("--dry-run").exit_code == 0
    assert CliRunner().invoke(main, ["status"]).exit_code == 0
