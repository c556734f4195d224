"""Checkpoints, data, tokenizers and models in a bucket, against a local S3 server."""

import gzip
import os
import re
import shutil
import signal
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
from ranks import start_small, titanlite
from small_runs import SMALL, losses
from tiny_run import list_names

from titanlite.checkpoint import mirror
from titanlite.checkpoint.manifest import encode_manifest
from titanlite.config.schema import Dataset
from titanlite.config.storage import list_files
from titanlite.data.sources.files import open_source

pytestmark = pytest.mark.slow
MIRROR = "--checkpoint.mirror", "s3://bucket/run"
URLS = {
    "s3://no": "not exist",
    MIRROR[1]: "Key Id",
    "run": "must be a URL",
    "memory://a": "outlive",
    "gs://a": "gcsfs",
}


@pytest.fixture
def server(tmp_path, monkeypatch):
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    server._port = server.get_host_and_port()[1]  # where it starts again
    settings = {
        "ACCESS_KEY_ID": "us",
        "SECRET_ACCESS_KEY": "us",
        "DEFAULT_REGION": "us-east-1",
        "MAX_ATTEMPTS": "1",
    }
    for name, value in {**settings, "ENDPOINT_URL": f"http://127.0.0.1:{server._port}"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("TITANLITE_CACHE", str(tmp_path / "cache"))
    tell("reset")
    bucket().mkdir("bucket")
    yield server
    tell("reset-auth", b"inf")
    server.stop()


def tell(what: str, body: bytes = b"") -> None:
    url = f"{os.environ['AWS_ENDPOINT_URL']}/moto-api/{what}"
    urllib.request.urlopen(
        urllib.request.Request(url, body, {"Content-Type": "text/plain"}, method="POST")
    ).close()


def bucket():
    return fsspec.filesystem("s3", skip_instance_cache=True, use_listings_cache=False)


def there(ending: str = "") -> dict[str, bytes]:
    """What the mirror holds: path -> content."""
    storage = bucket()
    found = [
        p
        for p in list_files(storage, "bucket/run")
        if p.endswith(ending) and not p.startswith(".titanlite")
    ]
    # Without what a start tries to write.
    return {p: storage.cat(f"bucket/run/{p}") for p in found}


def files(folder: Path, ending: str = "") -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob(f"step-*/*{ending}")}


def damage(step: int) -> None:
    storage, name = bucket(), f"bucket/run/step-{step:08d}/__0_0.distcp"
    content = storage.cat(name)
    storage.pipe(name, content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])


def test_another_node_resumes_from_the_newest_valid_checkpoint_of_the_mirror(server, tmp_path):
    keys = (
        *MIRROR,
        "--lr_scheduler.total_steps",
        20,
        "--checkpoint.interval",
        3,
        "--checkpoint.keep_latest_k",
        2,
    )
    # An old checkpoint is under way when the run ends.
    slow = "--checkpoint.mirror_mbps", 40
    start_small(tmp_path / "one", *keys, "--training.steps", 10, *slow, ranks=2).ends_with(0)
    kept = ["step-00000009/manifest.json", "step-00000010/manifest.json"]

    assert (sorted(there("manifest.json")), there()) == (kept, files(tmp_path / "one/checkpoint"))

    damage(10)
    bucket().pipe("bucket/run/step-00000011/manifest.json", encode_manifest({"step": 11}))
    # Nothing is brought that does not fit.
    start_small(tmp_path / "other", *keys, "--model.dim", 32).ends_with(2)

    assert not files(tmp_path / "other")
    assert "Resumed after step 9 " in start_small(tmp_path / "two", *keys).ends_with(0)
    assert losses(tmp_path / "two")[10] == pytest.approx(
        losses(tmp_path / "one")[10], rel=1e-5
    )  # sums of two ranks

    back = start_small(
        tmp_path / "back", *keys, "--checkpoint.load_step", 9, "--training.steps", 10
    )
    assert "Resumed after step 9 " in back.ends_with(0)

    bucket().rm_file("bucket/run/step-00000011/manifest.json")  # which no run touches
    assert sorted(there("manifest.json")) == kept

    titanlite("generate", "--checkpoint", "s3://bucket/run", "--max-new-tokens", 3)
    assert str(tmp_path) not in titanlite("verify", "s3://bucket/run")

    # As if another process had saved step 10.
    bucket().copy(*(f"bucket/run/{name}" for name in kept))
    assert "started twice" in start_small(
        tmp_path / "back", *keys, "--training.steps", 10
    ).ends_with(4)

    # And step 10 has another manifest.
    damage(9)
    # Now, and at every later start.
    for _ in range(2):
        start_small(tmp_path / "three", *keys).ends_with(4)


def test_interrupted_copy_is_not_a_checkpoint_and_is_repeated_by_the_next_start(server, tmp_path):
    words = *MIRROR, "--training.steps", 5
    world, deadline = (
        start_small(tmp_path / "one", *words, "--checkpoint.mirror_mbps", 0.1),
        time.monotonic() + 60,
    )
    while not there():
        assert time.monotonic() < deadline
    world.kill(0, signal.SIGKILL)
    world.wait()

    assert there("manifest.json") == {}

    bucket().pipe("bucket/run/other/step-00000001/.metadata", b"of another run, which sends it now")
    start_small(tmp_path / "one", *words).ends_with(0)

    assert there().keys() - files(tmp_path / "one/checkpoint").keys() == {
        "other/step-00000001/.metadata"
    }


def test_run_continues_without_the_server_and_fails_only_if_the_last_copy_fails(
    server, tmp_path, request
):
    words = (
        *MIRROR,
        "--checkpoint.interval",
        20,
        "--checkpoint.keep_latest_k",
        2,
    )
    # The run waits this long for its last copy, which fails because there is no server.
    short_wait = "--checkpoint.timeout_seconds", 5
    world = start_small(tmp_path / "one", *words, *short_wait, "--training.steps", 10**6)
    request.addfinalizer(world.close)
    world.wait_for("step +1/")
    server.stop()
    world.wait_for("Saved step 40 ")
    server.start()
    world.wait_for("Copied s3://")
    server.stop()
    world.kill(0, signal.SIGTERM)

    assert "s3://bucket/run" in world.ends_with(4)

    server.start()
    start_small(tmp_path / "one", *words, "--training.steps", 1).ends_with(0)

    assert there() == files(tmp_path / "one/checkpoint")


def test_mirror_never_changes_files_that_the_run_did_not_write(tmp_path):
    mirror = tmp_path / "mirror"
    foreign = [
        "step-00001000/lit_model.pth",
        "step-00000000/manifest.json",
        "final/step-00000002/a",
    ]
    foreign += ["step-00000004/.metadata", "step-00000002/notes.txt", "step-00000003/manifest.json"]
    for name in foreign:
        (mirror / name).parent.mkdir(parents=True)
        (mirror / name).write_text(name)
    every_second_step = "--checkpoint.interval", 2, "--checkpoint.keep_latest_k", 1
    words = "--checkpoint.mirror", f"file://{mirror}", *every_second_step

    start_small(tmp_path / "run", *words, "--training.steps", 2).ends_with(0)

    assert "manifest.json" in list_names(mirror / "step-00000002")

    said = start_small(tmp_path / "run", *words, "--training.steps", 4).ends_with(4)
    assert f"{mirror}/step-00000004 contains files that this run did not write" in said

    world = start_small(tmp_path / "run", *words, "--training.steps", 6)
    world.ends_with(0)

    assert all((mirror / name).read_text() == name for name in foreign)
    assert list_names(mirror / "step-00000002") == ["notes.txt"]
    assert list_names(mirror / "step-00000004") == [".metadata"]
    assert "manifest.json" in list_names(mirror / "step-00000006")


def test_imported_weights_are_kept_in_the_folder_and_at_the_mirror(tmp_path):
    mirror, run = tmp_path / "mirror", tmp_path / "run"
    words = (
        "--checkpoint.mirror",
        f"file://{mirror}",
        "--checkpoint.interval",
        1,
        "--checkpoint.keep_latest_k",
        1,
    )
    start_small(run, *words, "--training.steps", 1).ends_with(0)
    titanlite("average", run, run, "--out", tmp_path / "mean")
    start_small(run, *words, "--training.steps", 2).ends_with(0)
    for folder in (run / "checkpoint", mirror):
        shutil.copytree(tmp_path / "mean/step-00000001", folder / "step-00000001")

    start_small(run, *words, "--training.steps", 4).ends_with(0)

    for folder in (run / "checkpoint", mirror):
        assert list_names(folder / "step-00000001") == list_names(tmp_path / "mean/step-00000001")
        assert not (folder / "step-00000002").exists()


def test_mirror_with_only_imported_weights_is_an_error_before_training(tmp_path):
    run = tmp_path / "run"
    start_small(run, "--training.steps", 1).ends_with(0)
    titanlite("average", run, run, "--out", tmp_path / "mirror")

    new_run = start_small(tmp_path / "new", "--checkpoint.mirror", f"file://{tmp_path}/mirror")

    log = new_run.ends_with(2)

    assert "step-00000001 contains imported weights" in log
    assert "initial_load_path" in log
    assert not files(tmp_path / "new")


def fill_mirror() -> None:
    def raise_full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    mirror._RETRY_PAUSES = ()
    mirror.Mirror._copy_file = raise_full  # type: ignore[method-assign]


def test_full_mirror_on_a_local_disk_gets_no_advice_about_s3(tmp_path):
    url = f"file://{tmp_path}/mirror"
    words = "--checkpoint.mirror", url, "--training.steps", 1

    log = start_small(tmp_path / "run", *words, before=fill_mirror).ends_with(4)

    assert "No space left on device" in log
    assert "AWS" not in log


def test_next_start_finishes_an_interrupted_removal_at_the_mirror(tmp_path):
    mirror, words = (
        tmp_path / "mirror",
        ("--checkpoint.interval", 2, "--checkpoint.keep_latest_k", 1),
    )
    words = "--checkpoint.mirror", f"file://{mirror}", *words
    start_small(tmp_path / "run", *words, "--training.steps", 2).ends_with(0)
    # Of step 1, a part of the files is gone.
    for name in ("step-00000001", "step-00000002"):
        (mirror / name).mkdir(exist_ok=True)
        for file in ("manifest.json", ".metadata"):
            shutil.copy(tmp_path / "run/checkpoint/step-00000002" / file, mirror / name)
        shutil.copy(mirror / name / "manifest.json", mirror / name / "manifest.json.incomplete")
    (mirror / "step-00000001/manifest.json").unlink()
    start_small(tmp_path / "run", *words, "--training.steps", 4).ends_with(0)

    assert list_names(mirror) == ["step-00000004"]


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
    words = *MIRROR, "--training.steps", 1
    said = start_small(tmp_path / "one", *words, before=try_copies_twice).ends_with(4)

    [failure] = [line for line in said.splitlines() if "FAILED" in line]

    assert "s3://bucket/run/step-00000001" in failure
    assert "internal error" in failure
    assert str(tmp_path) not in failure
    assert "move this checkpoint away" not in said


@pytest.mark.parametrize(("url", "said"), URLS.items())
def test_unusable_url_is_an_error_before_the_start(server, tmp_path, url, said):
    # 0: from now on, keys are looked at.
    tell("reset-auth", b"0" if url == MIRROR[1] else b"inf")
    data = "--dataset.source", "text", "--dataset.path", url
    words = start_small(tmp_path / "one", "--checkpoint.mirror", url, *data).ends_with(2)

    assert [
        "checkpoint.mirror" in words,
        "dataset.path" in words,
        said in words,
        "Traceback" in words,
    ] == [1, 1, 1, 0]
    assert not (tmp_path / "one").exists()


def test_data_tokenizer_and_model_in_a_bucket_equal_local_ones(
    server, tmp_path, caplog, monkeypatch
):
    """Use one source of each kind. The losses equal those with local files bitwise."""
    here, job, texts = (
        tmp_path / "data",
        tmp_path / "job.toml",
        [f"text {i} " * 60 for i in range(200)],
    )
    lines = "".join(f'{{"text": "{text}"}}\n' for text in texts).encode()
    (here / "parts").mkdir(parents=True)
    for name in ("a.jsonl", "a.jsonl.gz", "a.txt", *(f"parts/{i}" for i in range(65))):
        (here / name).write_bytes(gzip.compress(lines) if name.endswith("gz") else lines)
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), here / "a.parquet", row_group_size=20
    )
    job.write_text(SMALL)
    source = "--dataset.source", "jsonl", "--dataset.path", here / "*.jsonl"
    titanlite("prepare", "--job.config_file", job, *source, "--out", here / "shards")
    (here / "tokenizer.model").write_bytes(Path("assets/tokenizer/tokenizer.model").read_bytes())
    bucket().put(str(here), "bucket", recursive=True)
    for folder in ("data/", "data/parts/", "data/shards/"):  # as consoles make them
        boto3.client("s3").put_object(Bucket="bucket", Key=folder)
    out = {name: tmp_path / name for name in ("local", "remote")}
    for name, place, steps, more in (
        ("local", here, 12, ()),
        ("remote", "s3://bucket/data", 10, MIRROR),
        ("remote", here, 12, MIRROR),
        ("local", here, 12, MIRROR),
    ):
        kinds = {
            "*.jsonl": "jsonl",
            "*.gz": "jsonl",
            "*.txt": "text",
            "*.parquet": "parquet",
            "shards": "shards",
        }
        sources = (
            f'[[dataset.sources]]\nsource = "{kinds[p]}"\npath = "{place}/{p}"\n' for p in kinds
        )
        job.write_text(
            f'{SMALL}\n[tokenizer]\npath = "{place}/tokenizer.model"\n{"".join(sources)}'
        )
        words = [
            "--training.steps",
            steps,
            "--lr_scheduler.total_steps",
            12,
            "--checkpoint.last_save_in_hf",
            *more,
        ]
        words = ["train", "--job.config_file", job, "--job.dump_folder", out[name], *words]
        # The mirror is another run's by then.
        titanlite(*words, code=2 if (name, more) == ("local", MIRROR) else 0)

    assert losses(out["local"]) == losses(out["remote"])

    gets = re.findall(r'"GET /bucket/data/(\S+) HTTP', caplog.text)
    # For all rows of both starts, because each file is smaller than a block.
    assert len(gets) == len({*gets}) > 6

    # One block in each of the 64 sets.
    monkeypatch.setenv("TITANLITE_CACHE_GB", "1e-9")
    parts = open_source(Dataset(source="text", path="s3://bucket/data/parts/**"))

    assert "".join(map(str, parts)) == lines.decode() * 65
    assert len([*tmp_path.glob("cache/blocks/*/[0-9]*")]) <= 64

    bucket().put(str(out["local"] / "final_hf"), "bucket/model", recursive=True)
    boto3.client("s3").put_object(Bucket="bucket", Key="model/")
    for name, model in (("1", out["local"] / "final_hf"), ("2", "s3://bucket/model")):
        titanlite("import", "--hf", model, "--out", tmp_path / name)

    assert files(tmp_path / "1", ".distcp") == files(tmp_path / "2", ".distcp")
