"""./run_train.sh: sets up once, refuses a wrong job before anything happens, and otherwise starts the ranks."""

import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from titanlite.config.errors import UserError
from titanlite.launch import agent, launcher

REPOSITORY = Path(__file__).parents[2]
NUMBERS = ("NGPU", "NNODES", "NODE_RANK", "MASTER_PORT", "MAX_RESTARTS")
VARIABLES = (*NUMBERS, "MASTER_ADDR", "LOG_RANK", "CUDA_VISIBLE_DEVICES", "TITANLITE_COMMAND")


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def executable(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(file.stat().st_mode | stat.S_IEXEC)


def launch_in_new_process(*argv: str) -> subprocess.CompletedProcess[str]:
    """The launcher, then the names of the heavy modules that it imported."""
    program = (
        "import sys; from titanlite.launch.launcher import main; code = main(sys.argv[1:]);"
        "print([name for name in ('torch', 'datasets', 'torchao') if name in sys.modules]); sys.exit(code)"
    )
    command = [sys.executable, "-c", program, *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# ------------------------------------------------------------------------------------------------------- a wrong job


def test_a_wrong_job_ends_with_2_before_torch_is_imported_or_a_folder_is_made(tmp_path: Path):
    ended = launch_in_new_process("--training.steps", "0", "--model.n_heads", "3")
    assert ended.returncode == 2
    assert ended.stdout == "[]\n"
    assert ended.stderr.startswith("2 mistakes in the job:")
    assert "Traceback" not in ended.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_launcher_needs_no_torch_to_run_its_workers(tmp_path: Path):
    """So it starts at once, and takes little memory while they train."""
    (tmp_path / "worker.py").write_text("")
    program = (
        "from titanlite.launch.agent import World, run_workers; code = run_workers(['worker.py'], World(2))\n"
        "import sys, titanlite.load_run, titanlite.checkpoint.go_on; print(code, 'torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.stdout, ended.stderr) == ("0 False\n", "")


def test_a_wrong_job_is_refused_within_two_seconds(tmp_path: Path, cpu_seconds: Callable[..., float]):
    file = tmp_path / "wrong.toml"
    file.write_text('[training]\nsteps = "abc"\n[modle]\ndim = 3\n')

    def refused() -> None:
        command = [REPOSITORY / "run_train.sh", "--job.config_file", file, "--optimizer.lr", "x"]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert ended.returncode == 2
        assert "3 mistakes in the job:" in ended.stderr

    refused()  # the first one may install
    assert cpu_seconds(refused) < 2.0  # 0.4 s on an idle machine
    assert [path.name for path in tmp_path.iterdir()] == ["wrong.toml"]


def test_the_job_is_checked_for_all_ranks_of_all_nodes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NGPU", "2")
    monkeypatch.setenv("NNODES", "3")
    monkeypatch.setenv("MASTER_ADDR", "here")
    with pytest.raises(UserError, match=r"data-parallel\s+degree = 6"):
        launcher.launch(["--training.global_batch_size", "8"])


def test_the_settings_for_a_cluster_reach_the_agent(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(agent, "run_workers", lambda command, world, saved: worlds.append(world) or 0)
    for name, value in {"NNODES": "2:3", "NODE_RANK": "1", "MASTER_ADDR": "here", "MAX_RESTARTS": "4"}.items():
        monkeypatch.setenv(name, value)
    for name in ("OMP_NUM_THREADS", "PYTHONFAULTHANDLER", "TORCHINDUCTOR_CACHE_DIR", "TITANLITE_COMMAND"):
        monkeypatch.setenv(name, "1")  # the launcher leaves them, and the state of this process, as they are
    worlds: list[agent.World] = []
    assert launcher.launch(["--comm.preemption_seconds", "7"]) == 0
    (world,) = worlds
    assert (world.stop_seconds, world.max_restarts, world.node_rank) == (7, 4, 1)


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"NGPU": "0"}, "NGPU=0: a whole number of at least 1"),
        ({"NGPU": "two"}, "NGPU=two"),
        ({"NNODES": "-1"}, "NNODES=-1"),
        ({"NNODES": "2"}, "needs MASTER_ADDR"),
        ({"NNODES": "2", "MASTER_ADDR": "x", "NODE_RANK": "2"}, "NODE_RANK=2 must be less than NNODES=2"),
        ({"NNODES": "9" * 5000}, "NNODES=999"),
        ({"NNODES": "2:1"}, "NNODES=2:1"),
        ({"NNODES": "2", "MASTER_ADDR": "node0;reboot"}, "MASTER_ADDR='node0;reboot'"),
        ({"NNODES": "2", "MASTER_ADDR": "node0\x1b[2J"}, r"MASTER_ADDR='node0\x1b[2J'"),
        ({"NNODES": "2", "MASTER_ADDR": "node0..cluster"}, "MASTER_ADDR='node0..cluster'"),
        ({"NNODES": "2", "MASTER_ADDR": "n" * 64}, f"MASTER_ADDR='{'n' * 64}'"),
        ({"NNODES": "2", "MASTER_ADDR": "node0", "MASTER_PORT": "99999"}, "MASTER_PORT=99999: a whole number from 1"),
        ({"MASTER_PORT": "ssh"}, "MASTER_PORT=ssh"),
        ({"NGPU": "999999999999"}, "so many processes need at least"),
        ({"NGPU": "1" * 30}, "NGPU=1111"),
        ({"LOG_RANK": "first"}, "LOG_RANK"),
        ({"LOG_RANK": "1"}, "there is no rank 1. The last of 1 is 0"),
        ({"LOG_RANK": "0,7", "NGPU": "2"}, "there is no rank 7"),
    ],
)
def test_a_wrong_variable_is_named(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert launcher.main([]) == 2
    assert said in capsys.readouterr().err


@pytest.fixture
def worlds(monkeypatch: pytest.MonkeyPatch) -> list[agent.World]:
    """What the launcher would have started: the worlds of a job on four nodes."""
    started: list[agent.World] = []
    monkeypatch.setattr(agent, "run_workers", lambda command, world, saved: started.append(world) or 0)
    for name, value in {"NNODES": "4", "NODE_RANK": "1", "MASTER_ADDR": "node0"}.items():
        monkeypatch.setenv(name, value)
    return started


NO_NAMES = [" ", "2\n", "\n", "\u0662", "\u00b2", "\x1b[2J", "\udcff", "n" * 300]
NO_NUMBERS = [*NO_NAMES, "9" * 400, "-1", "+1", "1e3", "0x2", "1_0", "1.0", "2 "]
NO_RANKS = [value for value in NO_NUMBERS if value.strip() != "2"]  # it takes spaces


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in NUMBERS for value in NO_NUMBERS),
        *(("LOG_RANK", value) for value in NO_RANKS),
        *(("MASTER_ADDR", value) for value in NO_NAMES),
    ],
)
def test_a_value_that_is_no_number_or_name_is_refused_in_one_line(
    name: str,
    value: str,
    worlds: list[agent.World],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setenv(name, value)
    assert launcher.main([]) == 2
    said = capsys.readouterr().err
    assert said.startswith(name)
    assert said.count("\n") == 1
    assert len(said) < 300
    assert said.rstrip().isprintable()
    assert worlds == []


@pytest.mark.parametrize(
    ("variables", "field", "value"),
    [
        ({"NGPU": "002"}, "workers", 2),
        ({"NNODES": "02:004"}, "min_nodes", 2),
        ({"NODE_RANK": "03"}, "node_rank", 3),
        ({"MASTER_PORT": "08080"}, "master_port", 8080),
        ({"MAX_RESTARTS": "0005"}, "max_restarts", 5),
        ({"LOG_RANK": " 00, 3 ,,"}, "shown_ranks", (0, 3)),
        ({"NGPU": ""}, "workers", 1),
        ({"NODE_RANK": ""}, "node_rank", None),
        ({"MASTER_PORT": ""}, "master_port", 29500),
        ({"MAX_RESTARTS": ""}, "max_restarts", 0),
        ({"LOG_RANK": ""}, "shown_ranks", (0,)),
        ({"NNODES": "", "NODE_RANK": "", "MASTER_ADDR": ""}, "nodes", 1),
    ],
)
def test_leading_zeros_are_decimal_and_an_empty_variable_is_one_that_is_not_set(
    variables: dict[str, str], field: str, value: object, worlds: list[agent.World], monkeypatch: pytest.MonkeyPatch
):
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    job = ["--training.local_batch_size", "1", "--training.global_batch_size", "24"]
    assert launcher.main(job) == 0
    (world,) = worlds
    assert getattr(world, field) == value


def test_the_command_that_goes_on_has_the_variables_of_this_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    def fail(command: list[str], world: agent.World, saved: agent.Saved) -> int:
        print(saved.how_to_go_on())
        return 1

    monkeypatch.setattr(agent, "run_workers", fail)
    cluster = {"NNODES": "4", "NODE_RANK": "1", "MASTER_ADDR": "node0", "MASTER_PORT": "29400", "MAX_RESTARTS": "2"}
    for name, value in (cluster | {"NGPU": "1", "TITANLITE_COMMAND": "./run_train.sh"}).items():
        monkeypatch.setenv(name, value)
    words = ["--job.dump_folder", str(tmp_path / "my run")]
    assert launcher.main(words) == 1
    variables = "NGPU=1 NNODES=4 NODE_RANK=1 MASTER_ADDR=node0 MASTER_PORT=29400 MAX_RESTARTS=2"
    end = f"./run_train.sh --job.dump_folder '{tmp_path}/my run'\n"
    assert capsys.readouterr().out == f"Nothing is saved. To start again: {variables} {end}"
    monkeypatch.setenv("TITANLITE_COMMAND", "./run_train.sh")
    for name in ("NNODES", "NODE_RANK"):  # what is left says nothing on one node
        monkeypatch.delenv(name)
    assert launcher.main(words) == 1
    assert capsys.readouterr().out == f"Nothing is saved. To start again: NGPU=1 {end}"


@pytest.mark.parametrize(("module", "words"), [("titanlite.launch", []), ("titanlite", ["train"])])
def test_no_late_signal_can_replace_the_exit_code(module: str, words: list[str]):
    """Neither program shuts Python down: its handlers would be gone by then."""
    program = (
        f"import atexit, runpy; atexit.register(print, 'shut down'); runpy.run_module('{module}', None, '__main__')"
    )
    command = [sys.executable, "-c", program, *words, "--training.steps", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGUSR2, 0), (signal.SIGINT, 130), (signal.SIGTERM, -15)])
def test_a_signal_in_the_first_moments_ends_in_silence_or_asks_for_nothing(number: signal.Signals, code: int):
    """SIGUSR2 means to save and go on, and there is nothing to save yet."""
    program = "import signal; from titanlite.runtime import process; process.begin(); signal.raise_signal({})"
    command = [sys.executable, "-c", program.format(int(number))]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (code, "")


def test_signals_that_came_before_a_worker_could_take_them_are_not_lost():
    program = "from titanlite.runtime import process; input(); process.begin(); print('not reached')"
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # as the launcher does
    worker = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    worker.send_signal(signal.SIGINT)
    assert worker.communicate(b"\n", timeout=60) == (b"", None)
    assert worker.returncode == 130


@pytest.mark.skipif(sys.platform != "linux", reason="the signal of a dead parent is Linux's")
def test_a_worker_whose_launcher_died_before_it_could_look_ends_at_once():
    worker = "import os; os.environ['TITANLITE_PARENT'] = '1234567'; from titanlite.runtime import process"
    command = [sys.executable, "-c", f"{worker}; process.begin(); print('alone')"]
    ended = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (143, b"")


@pytest.mark.parametrize(("number", "ends", "code"), [(signal.SIGTERM, 75, 143), (None, 3, 3), (None, 0, 0)])
def test_a_pod_that_is_evicted_saves_first(number: int | None, ends: int, code: int, tmp_path: Path):
    yaml = pytest.importorskip("yaml")
    job = yaml.safe_load((REPOSITORY / "scripts/kubernetes/pytorchjob.yaml").read_text())
    (container,) = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    save = "for i in {1..100}; do sleep 0.1; done" if number else ""
    ready = "sleep 1; echo ready"  # by when the shell that started it has set its own trap
    text = f"#!/bin/bash\ntrap 'sleep 0.5; touch saved; exit {ends}' TERM\n{ready}\n{save}\nexit {ends}\n"
    executable(tmp_path / "run_train.sh", text)
    environment = {**os.environ, "RANK": "0"}
    pod = subprocess.Popen([*container["command"], *container["args"]], stdout=subprocess.PIPE, env=environment)
    assert pod.stdout is not None
    assert pod.stdout.readline() == b"ready\n"
    if number:
        pod.send_signal(number)
    assert pod.wait(timeout=20) == code
    assert (tmp_path / "saved").exists() == bool(number)


# ------------------------------------------------------------------------------------------------------- GPUs


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 2), ("0", 1), ("1,0", 2), ("", 0), ("-1", 0), ("GPU-a,GPU-b,GPU-c", 2)]
)
def test_gpus_are_those_that_a_process_would_see(
    visible: str | None, count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    gpu = "GPU {}: NVIDIA H100 80GB HBM3 (UUID: GPU-{})"
    executable(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{gpu.format(0, 'a')}'\necho '{gpu.format(1, 'b')}'\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert launcher.count_gpus() == count


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(launcher, "count_gpus", lambda: 2)
    monkeypatch.setenv("NGPU", "3")
    with pytest.raises(UserError, match="NGPU=3: this machine has 2"):
        launcher.launch([])


def test_many_more_processes_than_cores_are_warned_of(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(agent, "run_workers", lambda command, world, saved: 0)
    monkeypatch.setattr(launcher, "_cores", lambda: 2)
    monkeypatch.setenv("NGPU", "9")
    assert launcher.main(["--training.local_batch_size", "1", "--training.global_batch_size", "9"]) == 0
    assert "NGPU=9: this machine has no GPU and 2 cores" in capsys.readouterr().err
    monkeypatch.setenv("NGPU", "8")
    assert launcher.main(["--training.local_batch_size", "1", "--training.global_batch_size", "8"]) == 0
    assert capsys.readouterr().err == ""


def test_without_a_driver_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launcher.count_gpus() == 0
    executable(tmp_path / "nvidia-smi", "#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    assert launcher.count_gpus() == 0


# ------------------------------------------------------------------------------------------------------- set-up

PYTHON_OF_VENV = """#!/bin/bash
# Stands for the Python of .venv: notes what pip is told; pip fails while a file named broken exists.
[[ "$*" == "-m pip --version" ]] && exit 0
echo "$*" >>installs
[[ ! -f broken ]]
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/setup.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("one")
    executable(tmp_path / ".venv/bin/python", PYTHON_OF_VENV)
    return tmp_path


def set_up(clone: Path, wanted: str = ".") -> tuple[int, int]:
    """Run setup.sh: its exit code, and how often pip was called so far."""
    code = subprocess.run([clone / "scripts/setup.sh", wanted], capture_output=True, check=False).returncode
    installs = clone / "installs"
    return code, len(installs.read_text().splitlines()) if installs.exists() else 0


def test_set_up_installs_once_and_again_when_pyproject_changes(clone: Path):
    assert set_up(clone) == (0, 1)
    assert set_up(clone) == (0, 1)
    (clone / "pyproject.toml").write_text("two")
    assert set_up(clone) == (0, 2)
    assert set_up(clone) == (0, 2)
    assert "pip install" in (clone / "installs").read_text()


@pytest.mark.skipif(shutil.which("flock") is None, reason="needs flock")
def test_of_many_nodes_that_share_the_folder_one_installs(clone: Path):
    slow = PYTHON_OF_VENV.replace('echo "$*"', 'sleep 0.3; echo "$*"')
    executable(clone / ".venv/bin/python", slow)
    nodes = [subprocess.Popen([clone / "scripts/setup.sh", "."], stderr=subprocess.DEVNULL) for _ in range(3)]
    assert [node.wait(timeout=30) for node in nodes] == [0, 0, 0]
    assert set_up(clone) == (0, 1)


def test_an_interrupted_installation_is_done_again(clone: Path):
    (clone / "broken").write_text("")
    assert set_up(clone) == (1, 1)
    (clone / "broken").unlink()
    assert set_up(clone) == (0, 2)
    assert set_up(clone) == (0, 2)


def test_the_development_tools_are_installed_once_and_cover_the_rest(clone: Path):
    assert set_up(clone) == (0, 1)
    assert set_up(clone, ".[dev]") == (0, 2)
    assert set_up(clone, ".[dev]") == (0, 2)
    (clone / "pyproject.toml").write_text("two")
    assert set_up(clone, ".[dev]") == (0, 3)
    assert set_up(clone, ".") == (0, 3)


def test_a_folder_that_was_moved_is_installed_again(clone: Path):
    assert set_up(clone) == (0, 1)
    assert set_up(clone.rename(clone.parent / f"{clone.name}-moved")) == (0, 2)


def lend(tmp_path: Path, old: str) -> subprocess.CompletedProcess[str]:
    """Set up without a network by a Python that lacks ensurepip, and has version 0.1 of one package."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts/setup.sh", tmp_path / "scripts")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, tmp_path)
    for name in ("titanlite", "train_configs", "assets"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    metadata = tmp_path / f"packages/{old}-0.1.dist-info/METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: {old}\nVersion: 0.1\n")
    broken = '[[ "$*" == "-m venv --clear .venv" ]] && exit 1'
    executable(tmp_path / "python", f'#!/bin/bash\n{broken}\nexec "{sys.executable}" "$@"\n')
    variables = {"PYTHON": str(tmp_path / "python"), "PIP_NO_INDEX": "1", "PYTHONPATH": str(tmp_path / "packages")}
    command = [tmp_path / "scripts/setup.sh", "."]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, check=False)


def test_a_python_that_has_all_packages_lends_them_without_a_network(tmp_path: Path):
    ended = lend(tmp_path, "typing_extensions")  # too old for others, which is theirs to say
    assert ended.returncode == 0, ended.stderr
    assert f"Using the packages of {sys.prefix}" in ended.stderr
    program = "import titanlite.launch, torchao, importlib.metadata; print(importlib.metadata.version('titanlite'))"
    subprocess.run([tmp_path / ".venv/bin/python", "-P", "-c", program], cwd=tmp_path, check=True)
    assert not list(tmp_path.glob(".venv/lib/*/site-packages/torch"))


def test_what_such_a_python_lacks_is_named(tmp_path: Path):
    ended = lend(tmp_path, "tyro")
    assert ended.returncode == 1
    assert ended.stderr.endswith("titanlite needs tyro>=1.0; there is 0.1\n")
