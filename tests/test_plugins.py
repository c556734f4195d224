"""Plugins add models, such as examples/gemma and the fused model in plugin_models.md."""

from pathlib import Path

import pytest
from ranks import run_ranks, run_small, titanlite
from small_runs import ROOT, SMALL_WITHOUT_WORKERS, read_documented_program, read_losses

from titanlite.config.certificate import hash_job
from titanlite.config.load import load_job
from titanlite.load_run import load_run

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("gemma")]
EXAMPLE = ROOT / "examples" / "gemma"

GEMMA = '[job]\nplugins = ["gemma"]\n[gemma]\nhidden_act = "relu"\n[model]\narchitecture = "gemma"'
JOB = SMALL_WITHOUT_WORKERS.replace("[model]", GEMMA).replace("n_kv_heads = 1", "n_kv_heads = 2")


@pytest.fixture(scope="module", autouse=True)
def installed(tmp_path_factory):
    """Make the example importable as an installed package."""
    folder = tmp_path_factory.mktemp("installed")
    (folder / "titanlite_gemma").symlink_to(EXAMPLE / "titanlite_gemma")
    write_entry_point(folder, "gemma = titanlite_gemma")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))  # ranks and what they start
        yield


@pytest.fixture(scope="module")
def trained(installed, tmp_path_factory) -> Path:
    """Train on one rank, export to `hf`, and return the output folder."""
    folder = tmp_path_factory.mktemp("gemma")
    (folder / "job.toml").write_text(JOB)
    titanlite(*train_options(folder, "alone"))
    paths = ("--checkpoint", folder / "alone", "--out", folder / "alone/hf")
    titanlite("export", *paths, "--dtype", "float32", "--job.plugins", "gemma")
    return folder / "alone"


def train_options(folder: Path, name: str, *options: object) -> tuple[object, ...]:
    job = ["--job.config_file", folder / "job.toml", "--job.dump_folder", folder / name]
    return ("train", *job, "--training.steps", 3, *options)


def assert_same_losses(a: Path, b: Path) -> None:
    """Compare losses in fp32 with a tolerance, because layouts add in different orders."""
    assert read_losses(a) == pytest.approx(read_losses(b), rel=2e-6)


@pytest.mark.parametrize(
    "layout",
    [
        "tensor_parallel",
        pytest.param("data_parallel_shard", marks=pytest.mark.long),
        pytest.param("pipeline_parallel", marks=pytest.mark.long),
        pytest.param("context_parallel", marks=pytest.mark.long),
    ],
)
def test_the_example_has_the_same_losses_in_each_layout(layout, trained):
    options = f"--parallelism.{layout}_degree 2 --training.local_batch_size 1".split()
    titanlite(*train_options(trained.parent, layout, *options), ranks=2)
    assert_same_losses(trained.parent / layout, trained)


def prove(folder: Path) -> str:
    options = f"--job.config_file {folder}/job.toml --job.dump_folder {folder}/proven"
    options += " --parallelism.tensor_parallel_degree 2 --activation_checkpoint.mode full"
    return titanlite("prove", *options.split(), ranks=4)


@pytest.mark.long
def test_the_example_is_proven(trained):
    assert "Proven" in prove(trained.parent)


@pytest.mark.parametrize(
    ("command", "needed"),
    [
        ("generate --checkpoint RUN --max-new-tokens 1", "--job.plugins gemma"),
        ("eval --checkpoint RUN --window 8 --data RUN/config.toml", "--job.plugins gemma"),
        ("replay RUN --step 2", "--job.plugins gemma"),
        ("export --checkpoint RUN --out RUN/again", "--job.plugins gemma"),
        ("import --hf RUN/hf --out RUN/imported", "olmo2"),
    ],
)
def test_a_checkpoint_or_a_model_folder_causes_no_import(command, needed, trained):
    argv = command.replace("RUN", str(trained)).split()
    assert needed in titanlite(*argv, code=2)
    titanlite(*argv, "--job.plugins", "gemma")


def test_keys_of_a_plugin_are_checked_and_a_missing_one_is_named(trained):
    check = ["check", "--job.config_file", trained / "config.toml", "--gemma.hidden_at", "relu"]
    assert "Did you mean gemma.hidden_act?" in titanlite(*check, code=2)
    assert '"none_such"' in titanlite(*check, "--job.plugins", "none_such", code=2)

    command = f"import --hf {trained}/hf --out {trained}/from_hf --job.plugins gemma"
    output = titanlite(*command.split())
    (trained / "from_hf.toml").write_text(output[output.index("[model]") :])
    titanlite("check", "--job.config_file", trained / "from_hf.toml")


def test_the_exported_example_has_the_same_logits_in_transformers(trained):
    run_ranks(1, compare_with_transformers, trained)


def compare_with_transformers(trained: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    import titanlite

    titanlite.load_plugins(["gemma"])
    ours = titanlite.load_checkpoint(trained).model
    theirs = AutoModelForCausalLM.from_pretrained(trained / "hf")
    assert type(theirs).__name__ == "GemmaForCausalLM"
    tokens = torch.arange(128).reshape(2, 64)
    torch.testing.assert_close(theirs(tokens).logits, ours(tokens), rtol=0, atol=1e-5)


FUSED = """
[[optimizer.groups]]
params = ["*.gate_up.weight", "*.down.weight", "*.wqkv.weight"]
lr_factor = 0.5
[[optimizer.groups]]
params = ["tok_*", "*norm.weight", "*.wo.weight", "output.weight"]
"""


@pytest.fixture
def fused(tmp_path, write_plugin) -> Path:
    """Create a job whose model has the fused projections of docs/reference/plugin_models.md."""
    write_plugin("my_fused", read_documented_program("plugin_models", "my_fused.py"))
    model = '[job]\nplugins = ["my_fused"]\n[model]\narchitecture = "fused"'
    job = SMALL_WITHOUT_WORKERS.replace("[model]", model).replace(
        "n_heads = 2\nn_kv_heads = 1", "n_heads = 4\nn_kv_heads = 2"
    )
    (tmp_path / "job.toml").write_text(job + FUSED)
    return tmp_path


def test_a_model_with_fused_projections_has_the_same_losses_with_tensor_parallelism(fused):
    titanlite(*train_options(fused, "alone"))
    titanlite(*train_options(fused, "two", "--parallelism.tensor_parallel_degree", 2), ranks=2)
    assert_same_losses(fused / "two", fused / "alone")


@pytest.mark.long
def test_a_model_with_fused_projections_is_proven(fused):
    assert "Proven" in prove(fused)


def test_groups_match_the_parameters_of_a_plugin(fused):
    job = fused / "job.toml"
    titanlite("check", "--job.config_file", job)
    job.write_text(job.read_text().replace("*.wqkv.weight", "*.wq.weight"))
    output = titanlite("check", "--job.config_file", job, code=2)

    assert '"*.wq.weight", which matches no parameter' in output
    assert "layers.0.attention.wqkv.weight and 1 more" in output


def test_residual_weights_of_a_plugin_start_smaller_with_depth(fused):
    run_ranks(1, check_initial_weights, fused / "job.toml")


def check_initial_weights(job: Path) -> None:
    from titanlite.config.registry import resolve
    from titanlite.model.llama import INIT_STD

    arch = load_run(["--job.config_file", str(job)], 1).arch
    model = resolve(arch.model)(arch)
    for layer, divisor in (("layers.0", 2**0.5), ("layers.1", 2.0)):
        for name in ("attention.wo", "feed_forward.down"):
            assert model.init_std(f"{layer}.{name}.weight") == INIT_STD / divisor
        assert model.init_std(f"{layer}.feed_forward.gate_up.weight") == INIT_STD

    class Misspelled(resolve("my_fused:FusedBlock")):
        residual_weights = ("attention.w0.weight",)

    type(model).block = Misspelled
    with pytest.raises(AttributeError, match="w0"):
        type(model)(arch)


NAMES_OF_JOB_ATTRIBUTES = """
from dataclasses import dataclass

from titanlite import Architecture, register
from titanlite.config.schema import Section
from titanlite.hooks.hook import Hook


@register("architecture", "dropped")
@dataclass(frozen=True)
class DroppedArchitecture(Architecture):
    architecture: str = "dropped"


class Keys(Section):
    '''Options of the hook.'''

    value: int = 1
    '''A number.'''


@register("hook", "copy", Keys)
class Copy(Hook):
    def __init__(self, keys):
        print(f"value {keys.value}")
"""


@pytest.fixture
def named(tmp_path, write_plugin) -> Path:
    """Create a job whose plugin has the names of attributes of the job."""
    write_plugin("named_plugin", NAMES_OF_JOB_ATTRIBUTES)
    job = '[job]\nplugins = ["named_plugin"]\nhooks = ["copy"]\n[model]\narchitecture = "dropped"'
    (tmp_path / "job.toml").write_text(SMALL_WITHOUT_WORKERS.replace("[model]", job))
    return tmp_path


def test_a_plugin_may_have_the_name_of_an_attribute_of_the_job(named):
    assert "value 7" in titanlite(*train_options(named, "run"), "--copy.value", 7)
    assert "default: 1" in titanlite(*train_options(named, "run"), "--help", "copy.value")


def test_the_hash_of_a_certificate_covers_the_options_of_plugins(named):
    def hash_with(value: int) -> str:
        # Each call needs a new process, because a plugin registers its options only once.
        options = f"--job.config_file {named}/job.toml --copy.value {value}"
        return run_ranks(1, hash_options, options.split())[0]

    assert hash_with(1) == hash_with(1)
    assert hash_with(1) != hash_with(2)


@pytest.mark.parametrize(
    ("name", "location"), [("module", "hashed_module"), ("object", "hashed_object:Hook")]
)
def test_the_hash_of_a_certificate_covers_a_plugin_that_an_entry_point_names(
    tmp_path, monkeypatch, name, location
):
    monkeypatch.syspath_prepend(tmp_path)
    plugin = tmp_path / f"hashed_{name}.py"
    plugin.write_text("")
    write_entry_point(tmp_path, f"{name} = {location}")
    job = load_job(["--job.plugins", name])

    before = hash_job(job)
    plugin.write_text("changed = True")

    assert hash_job(job) != before


def test_no_entry_point_of_the_current_folder_is_used(tmp_path, write_plugin, monkeypatch):
    write_plugin("good_plugin", "")
    here = tmp_path / "here"
    (here / "evil").mkdir(parents=True)
    (here / "evil" / "__init__.py").write_text("raise AssertionError('executed')")
    (here / "evil" / "part.py").touch()
    write_entry_point(here, "good_plugin = evil.part")
    monkeypatch.chdir(here)
    monkeypatch.syspath_prepend(here)  # as `python -m` does
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    # A search in the current folder would import and execute evil.
    assert hash_job(load_job(["--job.plugins", "good_plugin"]))


NOT_A_SECTION = """
from titanlite import register

class Keys:
    value = 1

register("hook", "broken", Keys)(object)
"""


@pytest.mark.parametrize(
    ("source", "line"),
    [(NOT_A_SECTION, 7), ("\nimport none_such", 2), ("\ndef f(:", 2)],
    ids=["no section", "missing import", "invalid syntax"],
)
def test_a_failed_import_of_a_plugin_names_the_line(source, line, write_plugin):
    write_plugin("broken_plugin", source)

    output = titanlite("check", "--job.plugins", "broken_plugin", code=2)

    assert f"broken_plugin.py:{line}" in output


RETURNS_NONE = """
from titanlite import register

@register("{KIND}", "empty_entry")
def return_none(*inputs):
    pass
"""


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        ("hook", "job.hooks"),
        ("optimizer", "optimizer.name"),
        ("source", "dataset.source"),
        ("tokenizer", "tokenizer.name"),
        ("metrics_logger", "metrics.loggers"),
    ],
)
def test_a_plugin_that_returns_no_object_is_named(kind, option, tmp_path, write_plugin):
    write_plugin("broken_plugin", RETURNS_NONE.replace("{KIND}", kind))
    options = f"--job.plugins broken_plugin --{option} empty_entry"

    output = run_small(tmp_path / "out", options, code=2)

    assert "'empty_entry'" in output


def write_entry_point(folder: Path, line: str) -> None:
    """Write the metadata of an installed package that declares a plugin."""
    metadata = folder / "some_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: some-package\nVersion: 1.0")
    (metadata / "entry_points.txt").write_text(f"[titanlite.plugins]\n{line}\n")


def hash_options(options: list[str]) -> str:
    return hash_job(load_run(options, 1).job)
