"""Runs mirror checkpoints to a bucket, and read data, tokenizers and models from it (local S3)."""

import gzip
import os
import re
import shutil
import signal
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import boto3
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from moto.server import ThreadedMotoServer
from ranks import run_small, start_small, titanlite
from small_runs import SMALL, read_losses, read_metrics
from tiny_run import list_names

from titanlite.checkpoint import mirror, saved_folders
from titanlite.checkpoint.manifest import encode_manifest
from titanlite.config.schema import Dataset
from titanlite.config.storage import list_files
from titanlite.data.sources.files import open_source

pytestmark = pytest.mark.slow
URL = "s3://bucket/run"
TO_BUCKET = f"--checkpoint.mirror {URL}"
KEEP_NEWEST = "--checkpoint.keep_latest_k 1"
EVERY_STEP = "--checkpoint.interval 1"
EVERY_SECOND_STEP = "--checkpoint.interval 2"


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._port = server.get_host_and_port()[1]  # kept at a restart
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server._port}")
    settings = "ACCESS_KEY_ID=us SECRET_ACCESS_KEY=us DEFAULT_REGION=us-east-1 MAX_ATTEMPTS=1"
    for setting in settings.split():
        name, _, value = setting.partition("=")
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    post("reset")
    bucket().mkdir("bucket")
    yield server
    post("reset-auth", b"inf")
    server.stop()


def post(action: str, body: bytes = b"") -> None:
    """Send a control request to the S3 server."""
    url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/{action}"
    headers = {"Content-Type": "text/plain"}
    urllib.request.urlopen(urllib.request.Request(url, body, headers, method="POST")).close()


def bucket():
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def read_mirror(ending: str = "") -> dict[str, bytes]:
    """Return paths and contents of the files at the mirror, without the probe file of a start."""
    storage = bucket()
    paths = [path for path in list_files(storage, "bucket/run") if path.endswith(ending)]
    return {
        path: storage.cat(f"bucket/run/{path}")
        for path in paths
        if not path.startswith(".titanlite")
    }


def read_files(folder: Path, ending: str = "") -> dict[str, bytes]:
    """Return relative paths and contents of the checkpoint files in a folder."""
    paths = folder.rglob(f"step-*/*{ending}")
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def flip_bit(step: int) -> None:
    """Flip a bit in a tensor file at the mirror."""
    storage = bucket()
    name = f"bucket/run/step-{step:08d}/__0_0.distcp"
    content = bytearray(storage.cat(name))
    content[-100] ^= 1
    storage.pipe(name, bytes(content))


@pytest.fixture
def mirror_folder(tmp_path) -> Path:
    return tmp_path / "mirror"


@pytest.fixture
def to_folder(mirror_folder) -> str:
    """Return the option to copy checkpoints to `mirror_folder`."""
    return f"--checkpoint.mirror file://{mirror_folder}"


RETENTION = "--checkpoint.interval 3 --checkpoint.keep_latest_k 2"
RETAINING_JOB = f"{TO_BUCKET} --lr_scheduler.total_steps 20 {RETENTION}"
RETAINED = ["step-00000009/manifest.json", "step-00000010/manifest.json"]


@pytest.fixture
def first_run(server, tmp_path) -> Path:
    """Train 10 steps on two ranks with a mirror, and return the output folder.

    The run ends while an older checkpoint is still being copied.
    """
    folder = tmp_path / "first"
    slow = "--training.steps 10 --checkpoint.mirror_mbps 40"
    run_small(folder, RETAINING_JOB, slow, ranks=2)
    return folder


def test_the_mirror_has_the_same_checkpoints_as_the_run_and_commands_read_them(first_run, tmp_path):
    assert sorted(read_mirror("manifest.json")) == RETAINED
    assert read_mirror() == read_files(first_run / "checkpoint")

    titanlite("generate", "--checkpoint", URL, "--max-new-tokens", 3)
    assert str(tmp_path) not in titanlite("verify", URL)


def test_another_node_resumes_from_the_newest_valid_checkpoint_of_the_mirror(first_run, tmp_path):
    flip_bit(10)

    output = run_small(tmp_path / "second", RETAINING_JOB, "--training.steps 10")

    assert "Resumed after step 9 " in output
    # The first run adds the losses of two ranks.
    expected = pytest.approx(read_losses(first_run)[10], rel=1e-5)
    assert read_losses(tmp_path / "second")[10] == expected
    # The new step 10 replaces the damaged one, whose manifest was renamed.
    assert sorted(read_mirror("manifest.json")) == RETAINED


def test_another_node_resumes_from_an_older_checkpoint_of_the_mirror(first_run, tmp_path):
    output = run_small(
        tmp_path / "second", RETAINING_JOB, "--checkpoint.load_step 9 --training.steps 10"
    )

    assert "Resumed after step 9 " in output
    manifests = read_mirror("manifest.json")
    assert sorted(manifests) == RETAINED
    # The run replaced step 10 of the first run.
    step_10 = RETAINED[1]
    assert manifests[step_10] == (tmp_path / "second/checkpoint" / step_10).read_bytes()


def test_a_job_that_does_not_match_the_checkpoints_of_the_mirror_downloads_nothing(
    first_run, tmp_path
):
    run_small(tmp_path / "other", RETAINING_JOB, "--model.dim 32", code=2)

    assert not read_files(tmp_path / "other")


def test_a_run_keeps_a_manifest_at_the_mirror_that_it_did_not_write(first_run, tmp_path):
    foreign = "step-00000011/manifest.json"
    bucket().pipe(f"bucket/run/{foreign}", encode_manifest({"step": 11}))

    output = run_small(tmp_path / "second", RETAINING_JOB, "--training.steps 12")

    assert "Resumed after step 10 " in output
    assert foreign in read_mirror("manifest.json")


def test_a_run_fails_if_another_process_has_saved_the_same_step_at_the_mirror(first_run):
    step_9, step_10 = (f"bucket/run/{name}" for name in RETAINED)
    bucket().copy(step_9, step_10)  # a different manifest of step 10

    output = run_small(first_run, RETAINING_JOB, "--training.steps 10", code=4)

    assert "started twice" in output


def test_every_start_fails_without_a_valid_checkpoint_at_the_mirror(first_run, tmp_path):
    flip_bit(9)
    flip_bit(10)

    for _ in range(2):
        run_small(tmp_path / "second", RETAINING_JOB, code=4)


def test_interrupted_copy_is_not_a_checkpoint_and_is_repeated_by_the_next_start(server, tmp_path):
    options = f"{TO_BUCKET} --training.steps 5"
    world = start_small(tmp_path / "one", options, "--checkpoint.mirror_mbps 0.1")
    deadline = time.monotonic() + 60
    while not read_mirror():
        assert time.monotonic() < deadline
    world.kill(0, signal.SIGKILL)
    world.wait()

    assert read_mirror("manifest.json") == {}

    bucket().pipe("bucket/run/other/step-00000001/.metadata", b"of another run, which sends it now")
    run_small(tmp_path / "one", options)

    assert read_mirror().keys() - read_files(tmp_path / "one/checkpoint").keys() == {
        "other/step-00000001/.metadata"
    }


def test_run_continues_without_the_server_and_fails_only_if_the_last_copy_fails(
    server, tmp_path, request
):
    options = f"{TO_BUCKET} --checkpoint.interval 20 --checkpoint.keep_latest_k 2"
    # The run waits this long for its last copy, which fails because there is no server.
    short_wait = "--checkpoint.timeout_seconds 5"
    world = start_small(tmp_path / "one", options, short_wait, "--training.steps 1000000")
    request.addfinalizer(world.close)
    world.wait_for("step +1/")
    server.stop()
    world.wait_for("Saved step 40 ")
    server.start()
    world.wait_for("Copied s3://")
    server.stop()
    world.kill(0, signal.SIGTERM)

    assert URL in world.wait_for_exit(4)

    server.start()
    run_small(tmp_path / "one", options, "--training.steps 1")

    assert read_mirror() == read_files(tmp_path / "one/checkpoint")


def test_mirror_never_changes_files_that_the_run_did_not_write(tmp_path, mirror_folder, to_folder):
    foreign = [
        "step-00000000/manifest.json",
        "step-00000002/notes.txt",
        "step-00000003/manifest.json",
        "step-00000004/.metadata",
        "step-00001000/lit_model.pth",
        "final/step-00000002/a",
    ]
    for name in foreign:
        path = mirror_folder / name
        path.parent.mkdir(parents=True)
        path.write_text(name)
    options = f"{to_folder} {EVERY_SECOND_STEP} {KEEP_NEWEST}"

    run_small(tmp_path / "run", options, "--training.steps 2")

    assert "manifest.json" in list_names(mirror_folder / "step-00000002")

    output = run_small(tmp_path / "run", options, "--training.steps 4", code=4)
    assert f"{mirror_folder}/step-00000004 contains files that this run did not write" in output

    run_small(tmp_path / "run", options, "--training.steps 6")

    assert all((mirror_folder / name).read_text() == name for name in foreign)
    assert list_names(mirror_folder / "step-00000002") == ["notes.txt"]
    assert list_names(mirror_folder / "step-00000004") == [".metadata"]
    assert "manifest.json" in list_names(mirror_folder / "step-00000006")


def test_imported_weights_are_kept_in_the_folder_and_at_the_mirror(
    tmp_path, mirror_folder, to_folder
):
    run = tmp_path / "run"
    options = f"{to_folder} {EVERY_STEP} {KEEP_NEWEST}"
    run_small(run, options, "--training.steps 1")
    titanlite("average", run, run, "--out", tmp_path / "mean")
    run_small(run, options, "--training.steps 2")
    imported = tmp_path / "mean/step-00000001"
    for folder in (run / "checkpoint", mirror_folder):
        shutil.copytree(imported, folder / imported.name)

    run_small(run, options, "--training.steps 4")

    for folder in (run / "checkpoint", mirror_folder):
        assert list_names(folder / imported.name) == list_names(imported)
        assert not (folder / "step-00000002").exists()


def test_mirror_with_only_imported_weights_is_an_error_before_training(
    tmp_path, mirror_folder, to_folder
):
    run = tmp_path / "run"
    run_small(run, "--training.steps 1")
    titanlite("average", run, run, "--out", mirror_folder)

    log = run_small(tmp_path / "new", to_folder, code=2)

    assert "step-00000001 contains imported weights" in log
    assert "initial_load_path" in log
    assert not read_files(tmp_path / "new")


def test_mirror_with_only_the_weights_of_the_last_step_is_an_error_before_training(
    tmp_path, mirror_folder, to_folder
):
    validation = "--checkpoint.keep_best --validation.freq 1 --validation.holdout 0.2"
    options = f"{to_folder} {validation} --checkpoint.last_save_model_only --training.steps 1"
    run_small(tmp_path / "run", options)
    assert list_names(mirror_folder) == ["final"]

    run_small(tmp_path / "new", options, code=4)


def fail_at_once() -> None:
    mirror._RETRY_PAUSES = ()


def raise_full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def fill_mirror() -> None:
    """Fill the disk of the mirror after the first bytes of each file."""

    def copy_first_bytes(self: mirror.Mirror, path: Path, target: str, entry: object) -> None:
        Path(target).write_bytes(path.read_bytes()[:10])
        raise_full()

    fail_at_once()
    mirror.Mirror._copy_file = copy_first_bytes  # type: ignore[method-assign]


def test_full_mirror_on_a_local_disk_keeps_no_partial_copy_and_gets_no_advice_about_s3(
    tmp_path, mirror_folder, to_folder
):
    run = tmp_path / "run"
    run_small(run, to_folder, "--training.steps 1")

    log = run_small(run, to_folder, "--training.steps 2", code=4, before=fill_mirror)

    assert "No space left on device" in log
    assert "AWS" not in log
    assert list_names(mirror_folder) == ["step-00000001"]


def fail_to_export() -> None:
    saved_folders.export_hf = raise_full


def test_run_whose_export_fails_still_waits_for_its_last_copy(tmp_path, mirror_folder, to_folder):
    # The second copy starts three seconds after the first one.
    slow = f"{to_folder} {EVERY_STEP} --checkpoint.mirror_mbps 20"
    options = f"{slow} --training.steps 2 --checkpoint.last_save_in_hf"

    run_small(tmp_path / "run", options, code=4, before=fail_to_export)

    assert "manifest.json" in list_names(mirror_folder / "step-00000002")


def test_next_start_cleans_up_after_interrupted_copies_and_removals_at_the_mirror(
    tmp_path, mirror_folder, to_folder
):
    run = tmp_path / "run"
    options = f"{to_folder} {EVERY_SECOND_STEP} --training.steps 4"
    run_small(run, options)
    shutil.rmtree(run / "checkpoint/step-00000002")
    # A start that was killed has removed some files of step 1.
    interrupted = shutil.copytree(mirror_folder / "step-00000002", mirror_folder / "step-00000001")
    (interrupted / "__0_0.distcp").unlink()
    (interrupted / "manifest.json").rename(interrupted / "manifest.json.incomplete")
    # Other copies were interrupted just before their manifest was renamed.
    for manifest in mirror_folder.glob("*/manifest.json"):
        shutil.copy(manifest, f"{manifest}.incomplete")

    log = run_small(run, options, KEEP_NEWEST, before=fail_at_once)

    assert "Could not" not in log
    assert list_names(mirror_folder) == ["step-00000004"]
    assert not list(mirror_folder.rglob("*.incomplete"))


def test_empty_local_folder_of_the_selected_step_is_replaced_by_that_of_the_mirror(
    tmp_path, to_folder
):
    options = f"{to_folder} {EVERY_SECOND_STEP} --training.steps 4"
    run_small(tmp_path / "one", options)
    (tmp_path / "two/checkpoint/step-00000002").mkdir(parents=True)

    log = run_small(tmp_path / "two", options, "--checkpoint.load_step 2")

    assert "Resumed after step 2 " in log


def fail_to_list_checkpoints_in_the_thread() -> None:
    list_checkpoints = mirror.list_checkpoints

    def list_or_fail(*folders: Path) -> list[Path]:
        if threading.current_thread() is not threading.main_thread():
            raise OSError(116, "Stale file handle")
        return list_checkpoints(*folders)

    mirror.list_checkpoints = list_or_fail  # type: ignore[assignment]


def test_error_outside_of_the_storage_is_counted_and_fails_the_last_copy(tmp_path, to_folder):
    options = f"{to_folder} --training.steps 3"

    log = run_small(
        tmp_path / "run", options, code=4, before=fail_to_list_checkpoints_in_the_thread
    )

    assert "Stale file handle" in log
    assert read_metrics(tmp_path / "run")[3]["failed_mirrors"] == 1


def try_copies_twice() -> None:
    mirror._RETRY_PAUSES = (0,)


@pytest.mark.parametrize("file", [".metadata", "__0_0.distcp", "manifest.json"])
def test_storage_error_names_the_storage_and_not_the_local_checkpoint(server, tmp_path, file):
    app = server._server.app

    def fail_uploads(environ: Any, start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] == "PUT" and environ["PATH_INFO"].endswith(file):
            start_response("500 Internal Server Error", [("Content-Type", "application/xml")])
            return [b"<Error><Code>InternalError</Code><Message>internal error</Message></Error>"]
        return app(environ, start_response)

    server._server.app = fail_uploads
    options = f"{TO_BUCKET} --training.steps 1"

    output = run_small(tmp_path / "one", options, code=4, before=try_copies_twice)

    [failure] = [line for line in output.splitlines() if "Could not" in line]
    assert f"{URL}/step-00000001" in failure
    assert "internal error" in failure
    assert str(tmp_path) not in failure
    assert "move this checkpoint away" not in output


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("s3://no", "not exist"),
        (URL, "Key Id"),
        ("run", "must be a URL"),
        ("memory://a", "outlive"),
        ("gs://a", "gcsfs"),
    ],
)
def test_unusable_url_is_an_error_before_the_start(server, tmp_path, url, reason):
    # After 0 further requests, the server checks access keys.
    post("reset-auth", b"0" if url == URL else b"inf")
    data = f"--dataset.source text --dataset.path {url}"

    output = run_small(tmp_path / "one", f"--checkpoint.mirror {url}", data, code=2)

    for text in ("checkpoint.mirror", "dataset.path", reason):
        assert text in output
    assert "Traceback" not in output
    assert not (tmp_path / "one").exists()


@pytest.mark.parametrize(
    "url",
    ["file:{run}/checkpoint", "local://{run}/checkpoint", "file://copies"],
    ids=["file URL with one slash", "local URL", "relative URL"],
)
def test_mirror_in_the_output_folder_or_with_a_relative_path_is_rejected(tmp_path, url):
    run = tmp_path / "run"

    output = run_small(run, f"--checkpoint.mirror {url.format(run=run)}", code=2)

    assert "checkpoint.mirror" in output


def write_job(file: Path, data_folder: object) -> None:
    """Write a job that reads one source of each kind and the tokenizer from a folder or bucket."""
    kinds = {"*.jsonl": "jsonl", "*.gz": "jsonl", "*.txt": "text"}
    kinds |= {"*.parquet": "parquet", "shards": "shards"}
    text = f'{SMALL}\n[tokenizer]\npath = "{data_folder}/tokenizer.model"\n'
    for pattern, kind in kinds.items():
        text += f'[[dataset.sources]]\nsource = "{kind}"\npath = "{data_folder}/{pattern}"\n'
    file.write_text(text)


def write_data(folder: Path) -> bytes:
    """Write the same texts in several formats and a tokenizer. Return the texts as JSON lines."""
    texts = [f"text {i} " * 60 for i in range(200)]
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()
    (folder / "parts").mkdir(parents=True)
    names = ["a.jsonl", "a.txt", *(f"parts/{i}" for i in range(65))]
    for name in names:
        (folder / name).write_bytes(lines)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress(lines))
    table = pyarrow.table({"text": texts})
    pyarrow.parquet.write_table(table, folder / "a.parquet", row_group_size=20)
    shutil.copy("assets/tokenizer/tokenizer.model", folder)
    return lines


def test_data_tokenizer_and_model_in_a_bucket_equal_local_ones(
    server, tmp_path, caplog, monkeypatch
):
    """The losses are bitwise equal to those with local files."""
    data = tmp_path / "data"
    job = tmp_path / "job.toml"
    job.write_text(SMALL)
    lines = write_data(data)
    source = "--dataset.source", "jsonl", "--dataset.path", data / "*.jsonl"
    titanlite("prepare", "--job.config_file", job, *source, "--out", data / "shards")
    bucket().put(str(data), "bucket", recursive=True)
    # Web consoles create such empty objects for folders.
    for folder in ("data/", "data/parts/", "data/shards/"):
        boto3.client("s3").put_object(Bucket="bucket", Key=folder)

    def train_on(
        data_folder: object,
        out: Path,
        options: str,
        code: int = 0,
    ) -> None:
        write_job(job, data_folder)
        options += " --lr_scheduler.total_steps 12 --checkpoint.last_save_in_hf"
        files = ("--job.config_file", job, "--job.dump_folder", out)
        titanlite("train", *files, *options.split(), code=code)

    local = tmp_path / "local"
    remote = tmp_path / "remote"
    train_on(data, local, "--training.steps 12")
    train_on("s3://bucket/data", remote, f"--training.steps 10 {TO_BUCKET}")
    train_on(data, remote, f"--training.steps 12 {TO_BUCKET}")
    # The mirror belongs to the other run now.
    train_on(data, local, f"--training.steps 12 {TO_BUCKET}", code=2)
    assert read_losses(local) == read_losses(remote)

    # Each file is smaller than a block, and both starts download each block once.
    gets = re.findall(r'"GET /bucket/data/(\S+) HTTP', caplog.text)
    assert len(gets) == len({*gets}) > 6

    # A tiny cache keeps one block in each of its 64 sets.
    monkeypatch.setenv("TITANLITE_CACHE_GB", "1e-9")
    parts = open_source(Dataset(source="text", path="s3://bucket/data/parts/**"))
    assert "".join(map(str, parts)) == lines.decode() * 65
    assert len([*tmp_path.glob("cache/blocks/*/[0-9]*")]) <= 64

    bucket().put(str(local / "final_hf"), "bucket/model", recursive=True)
    boto3.client("s3").put_object(Bucket="bucket", Key="model/")
    titanlite("import", "--hf", local / "final_hf", "--out", tmp_path / "1")
    titanlite("import", "--hf", "s3://bucket/model", "--out", tmp_path / "2")
    assert read_files(tmp_path / "1", ".distcp") == read_files(tmp_path / "2", ".distcp")
