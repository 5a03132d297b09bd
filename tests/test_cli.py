"""The command line: exit codes, what goes to stdout and what to stderr, and every kind of target."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

import memopt
from memopt.calibrate import Effort
from memopt.cli import app
from memopt.report import module_group, op_name

FACTORIES = """
import torch
from torch import nn
import memopt


def model(width=64):
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 64))


def workload(batch=512):
    m = model()
    return memopt.Workload(m, args=(torch.zeros(batch, 64),), loss=lambda y: y.square().mean(),
                           optimizer=torch.optim.AdamW(m.parameters()))


def as_dict():
    print("the user's own output")
    return {"model": model(), "args": (torch.zeros(512, 64),), "loss": lambda y: y.sum()}


class SelfContained(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model()

    def forward(self):
        return self.layers(torch.ones(512, 64)).square().mean()


def misspelt():
    return {"modle": model()}


def number():
    return 7


def needy(path):
    return workload()


def broken():
    raise KeyError("no such checkpoint")


def wrong_shape():
    return memopt.Workload(model(), args=(torch.zeros(512, 63),), loss=lambda y: y.sum())


def two_losses():
    return memopt.Workload(model(), args=(torch.zeros(512, 64),), loss=lambda y: y.sum(0))


def looks_at_data():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model()

        def forward(self, x):
            return self.layers(x) * (2 if float(x.sum()) > 0 else 1)

    return memopt.Workload(Odd(), args=(torch.zeros(512, 64),), loss=lambda y: y.sum())
"""

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
}
ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("factories") / "cli_factories.py"
    path.write_text(FACTORIES)
    return path


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    return path


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(a) for a in arguments])


def report(*arguments: object) -> dict:
    done = run("report", *arguments, "--json")
    assert done.exit_code in (0, 3), done.stderr
    return json.loads(done.stdout)


def error_line(done: Result) -> str:
    """The only line on stderr that is no progress; no result and no traceback anywhere."""
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("memopt: error:")]
    return line


def test_version_is_the_package_s():
    assert run("--version").stdout == f"memopt {memopt.__version__}\n"


@pytest.mark.parametrize("name", ["workload", "as_dict", "SelfContained"])
def test_every_kind_of_factory_in_a_file_is_reported(factories, name):
    data = report(f"{factories}:{name}", "--budget", "1GiB")
    assert data["fits"] is True
    assert data["plan"]["num_recomputed"] == 0


def test_module_and_factory_are_found_from_the_current_folder(factories, monkeypatch):
    monkeypatch.chdir(factories.parent)
    assert report("cli_factories:workload", "--budget", "1GiB")["fits"] is True


def test_json_has_the_documented_keys_and_sums(factories):
    data = report(f"{factories}:workload", "--budget", "min")
    assert set(data) == {
        *("target", "about", "device", "hardware", "mode", "micro_batches", "fits", "budget_bytes"),
        *("smallest_budget_bytes", "plain", "plan", "remedies", "notes"),
    }
    assert set(data["plain"]) == {"peak_bytes", "peak_at", "step_s", "by_kind", "modules"}
    plan = data["plan"]
    assert {"peak_bytes", "by_kind", "step_s", "slowdown", "gap", "drops", "num_recomputed"} <= set(plan)
    assert sum(data["plain"]["by_kind"].values()) == data["plain"]["peak_bytes"]
    assert data["smallest_budget_bytes"] <= plan["peak_bytes"] <= data["budget_bytes"]
    assert plan["num_recomputed"] > 0
    assert sum(n for group in plan["drops"] for n in group["ops"].values()) == plan["num_recomputed"]


def test_json_is_all_of_stdout_even_if_the_factory_prints(factories):
    done = run("report", f"{factories}:as_dict", "--json")
    assert json.loads(done.stdout)["fits"] is None
    assert "the user's own output" in done.stderr


def test_tables_name_kinds_budget_and_verdict(factories):
    done = run("report", f"{factories}:workload", "--budget", "min")
    assert done.exit_code == 0
    for text in ("optimizer states", "activations", "Recomputed in backward", "gelu", "Fits", "smallest budget"):
        assert text in done.stdout


def test_budget_that_does_not_fit_exits_3_with_remedies_that_were_profiled(factories):
    done = run("report", f"{factories}:workload", "--budget", "100KB", "--json")
    data = json.loads(done.stdout)
    assert done.exit_code == 3
    assert data["fits"] is False
    assert data["plan"] is None
    half = next(r for r in data["remedies"] if r["change"] == "batch 256 instead of 512")
    direct = report(f"{factories}:workload", "--batch", 256)
    assert half["plain_peak_bytes"] == direct["plain"]["peak_bytes"]
    assert half["smallest_bytes"] == direct["smallest_budget_bytes"] < data["smallest_budget_bytes"]
    sgd = next(r for r in data["remedies"] if r["change"].startswith("SGD"))
    assert sgd["smallest_bytes"] == report(f"{factories}:workload", "--optimizer", "sgd")["smallest_budget_bytes"]


@pytest.mark.parametrize("budget", ["min", "1010KiB"])
def test_disk_is_told_in_json(factories, tmp_path, budget):
    without = report(f"{factories}:workload", "--budget", "min")
    data = report(f"{factories}:workload", "--budget", budget, "--nvme", tmp_path / "disk", "--no-advice")
    plan, disk = data["plan"], data["plan"]["disk"]
    assert without["plan"]["disk"] is None
    assert plan["peak_bytes"] <= data["budget_bytes"]
    assert data["smallest_budget_bytes"] < without["smallest_budget_bytes"]
    assert "offload" in plan["levers"]
    assert disk["nvme"] == str(tmp_path / "disk")
    assert sum(disk["by_kind"].values()) == disk["store_bytes"] > 0
    assert disk["num_tensors"].keys() == disk["by_kind"].keys()
    assert disk["read_bytes"] > 0
    assert disk["written_bytes"] > 0
    assert disk["lane_s"] > 0
    added = plan["recompute_s"] + sum(disk["stalls_s"].values())
    assert plan["plain_step_s"] + added == pytest.approx(plan["step_s"])
    if budget == "min":
        assert data["budget_bytes"] == data["smallest_budget_bytes"]


def test_disk_table_names_bytes_traffic_and_causes(wide, tmp_path):
    disk = tmp_path / "a [long] path" / "of several names" / "that no table's title would hold"
    disk.mkdir(parents=True)
    done = run("report", f"{wide}:workload", "--budget", "min", "--nvme", disk, "--no-advice")
    assert done.exit_code == 0
    for text in (
        *("On disk", f"kept under {disk}\n", "optimizer states", "room taken", "read in a step", "written in a step"),
        *("disk is busy", "waiting for the disk, step"),
    ):
        assert text in done.stdout


def test_smallest_budget_with_a_disk_is_told_without_a_budget_too(factories, tmp_path):
    target = f"{factories}:workload"
    least = report(target, "--budget", "min", "--nvme", tmp_path, "--no-advice")["budget_bytes"]
    assert report(target, "--nvme", tmp_path)["smallest_budget_bytes"] == least
    assert report(target, "--nvme", tmp_path, "--budget", "1KiB", "--no-advice")["smallest_budget_bytes"] == least


def test_remedies_may_use_the_disk_too(factories, tmp_path):
    with_disk = report(f"{factories}:workload", "--budget", "1KiB", "--nvme", tmp_path)
    without = report(f"{factories}:workload", "--budget", "1KiB")
    pairs = list(zip(with_disk["remedies"], without["remedies"], strict=True))
    assert all(a["smallest_bytes"] <= b["smallest_bytes"] for a, b in pairs)
    assert any(a["smallest_bytes"] < b["smallest_bytes"] for a, b in pairs)


@pytest.mark.parametrize("allow", [["offload"], ["offload", "recompute"]])
def test_levers_with_a_disk_are_those_allowed(factories, tmp_path, allow):
    options = [option for lever in allow for option in ("--allow", lever)]
    data = report(f"{factories}:workload", "--budget", "min", "--nvme", tmp_path, "--no-advice", *options)
    assert set(data["plan"]["levers"]) <= set(allow)


@pytest.fixture
def calibrating(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to nothing is measured, and kept for this test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    small = Effort(matrix=16, half_matrix=16, tensor_bytes=(4096,), num_rounds=2, rounds_s=0.0, num_layers=1)
    small = dataclasses.replace(small, num_steps=2, disk_bytes=2**16, watch_s=0.0)
    monkeypatch.setattr("memopt.calibrate.effort_for", lambda device: small)


@pytest.mark.usefixtures("calibrating")
def test_calibrate_says_what_it_measured_and_reports_use_it(factories, tmp_path):
    data = json.loads(run("calibrate", "--nvme", tmp_path, "--json").stdout)
    assert Path(data["path"]).is_relative_to(tmp_path / "cache" / "memopt")
    assert data["hardware"]["flops_per_s"] > 0
    assert data["nvme"] == str(tmp_path)
    assert report(f"{factories}:workload")["hardware"] == data["hardware"]["name"] == "cpu (calibrated)"
    assert report(f"{factories}:workload", "--hardware", "h100")["hardware"] == "h100"


@pytest.mark.usefixtures("calibrating")
def test_calibrate_shows_measured_beside_catalogue():
    done = run("calibrate")
    assert done.exit_code == 0, done.stderr
    for text in (
        "float32 matrix products",
        "GFLOP/s",
        "100.00",
        "op, replayed",
        "not measured",
        "--nvme PATH",
        "kept in",
    ):
        assert text in done.stdout


@pytest.mark.usefixtures("calibrating")
def test_calibrate_refuses_what_it_cannot_measure(tmp_path):
    (tmp_path / "file").touch()
    assert run("calibrate", "--device", "abacus").exit_code == 2
    assert run("calibrate", "--device", "meta").exit_code == 4
    assert "ENOTDIR" in error_line(run("calibrate", "--nvme", tmp_path / "file"))


def test_config_json_is_reported_without_weights(llama):
    data = report(llama, "--batch", 2, "--seq", 128, "--budget", "min")
    # embedding and head, and per layer: q and o, k and v, three of the mlp, two norms; the last norm
    num = 2 * 256 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64) + 64
    assert data["plain"]["by_kind"]["parameter"] == 4 * num
    assert sum(share["parameter_bytes"] for share in data["plain"]["modules"]) == 4 * num
    assert data["plain"]["by_kind"]["input"] == 2 * 2 * 128 * 8
    assert data["fits"] is True


def test_folder_with_a_config_and_a_type_of_parameters(llama):
    data = report(llama.parent, "--seq", 128, "--dtype", "bfloat16", "--optimizer", "none")
    assert "in bfloat16" in data["about"]
    assert "optimizer state" not in data["plain"]["by_kind"]


def test_larger_batch_and_micro_batches_take_more(llama):
    one = report(llama, "--seq", 64)["plain"]["peak_bytes"]
    assert report(llama, "--seq", 64, "--batch", 4)["plain"]["peak_bytes"] > one
    assert report(llama, "--seq", 64, "--micro-batches", 4)["plain"]["peak_bytes"] >= one


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"], **ENCODER}, "2x64 2x64"),
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"], **ENCODER}, "2x64 2"),
        ({"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 256}, "2x64 2x64"),
        (
            {
                "model_type": "t5",
                "architectures": ["T5ForConditionalGeneration"],
                **{"d_model": 32, "d_ff": 64, "num_layers": 1, "num_heads": 2, "d_kv": 16},
                **{"vocab_size": 256, "decoder_start_token_id": 0},
            },
            "2x64 2x64",
        ),
    ],
    ids=["masked", "classification", "causal by model_type", "text to text"],
)
def test_text_models_get_inputs_and_labels_of_their_kind(tmp_path, config, inputs):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    assert f"inputs {inputs}," in report(path, "--batch", 2, "--seq", 64)["about"]


def test_image_model_gets_images(tmp_path):
    path = tmp_path / "config.json"
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, **ENCODER}
    path.write_text(json.dumps({**config, "patch_size": 8}))
    assert "inputs 2x3x32x32 2," in report(path, "--batch", 2)["about"]
    assert "no --seq" in error_line(run("report", path, "--seq", 16))


def test_saved_profile_gives_the_same_report(factories, tmp_path):
    saved, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    first = report(f"{factories}:workload", "--budget", "min", "--save-profile", saved, "--save-plan", plan)
    again = report(saved, "--budget", "min")
    assert {k: v for k, v in again.items() if k in ("plain", "plan", "fits")} == {
        k: v for k, v in first.items() if k in ("plain", "plan", "fits")
    }
    assert memopt.Plan.load(plan).forecast.peak_bytes == first["plan"]["peak_bytes"]


def test_mode_run_and_a_forward_that_looks_at_its_data(factories):
    assert report(f"{factories}:workload", "--mode", "run")["mode"] == "run"
    data = report(f"{factories}:looks_at_data", "--budget", "1GiB")
    assert data["mode"] == "run"
    assert any("profiled for real" in note for note in data["notes"])


def test_share_of_named_hardware_is_of_its_memory(llama):
    data = report(llama, "--seq", 64, "--hardware", "h100", "--budget", "50%")
    assert data["budget_bytes"] == 40 * 2**30
    assert any("h100" in note for note in data["notes"])


@pytest.mark.parametrize("budget", ["6", "6G", "lots", "-1GiB", "0B", "120%", "0%", "", "nanGiB"])
def test_nonsense_budgets_exit_2_and_are_repeated(factories, budget):
    done = run("report", f"{factories}:workload", f"--budget={budget}")
    assert done.exit_code == 2
    assert repr(budget) in error_line(done)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere.py:f"], "no file nowhere.py"),
        (["nowhere/config.json"], "no file"),
        (["no_such_module:f"], "no module 'no_such_module'"),
        (["just_a_word"], "module:factory"),
        (["{file}:absent"], "it has"),
        (["{file}:misspelt"], "modle"),
        (["{file}:number"], "gives a int"),
        (["{file}:needy"], "needs path"),
        (["{file}:model"], "needs input"),
        (["{file}:as_dict", "--batch", "4"], "takes no batch"),
        (["{file}:workload", "--dtype", "float16"], "takes no dtype"),
        (["{file}:workload", "--hardware", "abacus"], "no hardware named 'abacus'"),
        (["{file}:workload", "--allow", "magic"], "unknown levers"),
        (["{file}:workload", "--budget", "min", "--allow", "offload"], "needs a directory"),
        (["{file}:workload", "--nvme", "/tmp", "--allow", "recompute"], "leaves out"),
        (["{file}:workload", "--save-plan", "plan.json"], "needs --budget"),
        (["{file}:workload", "--save-profile", "/no/such/folder/p.json"], "No such file"),
    ],
)
def test_wrong_use_exits_2_with_one_line(factories, arguments, says):
    done = run("report", *(a.format(file=factories) for a in arguments))
    assert done.exit_code == 2
    assert says in error_line(done)


@pytest.mark.parametrize(
    ("name", "says"), [("broken", "KeyError: 'no such checkpoint'"), ("wrong_shape", "mat1 and mat2")]
)
def test_user_s_own_exception_exits_2_with_file_and_line(factories, name, says):
    done = run("report", f"{factories}:{name}")
    assert done.exit_code == 2
    assert says in error_line(done)
    if name == "broken":
        number = FACTORIES.splitlines().index('    raise KeyError("no such checkpoint")') + 1
        assert f"{factories}:{number}" in error_line(done)


def test_files_that_are_not_json_or_not_ours_exit_2(tmp_path):
    for text, says in (("{", "JSON"), ("[]", "neither"), ("{}", "neither"), ('{"format": "memopt.plan"}', "version")):
        path = tmp_path / "config.json"
        path.write_text(text)
        done = run("report", path)
        assert done.exit_code == 2
        assert says in error_line(done)


@pytest.mark.parametrize("lever", ["shard"])
def test_lever_that_this_version_lacks_exits_4(factories, lever):
    done = run("report", f"{factories}:workload", "--budget", "1GiB", "--allow", lever)
    assert done.exit_code == 4
    assert lever in error_line(done)


def test_model_or_loss_that_is_not_supported_exits_4(factories, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    assert run("report", path).exit_code == 4
    done = run("report", f"{factories}:two_losses")
    assert done.exit_code == 4
    assert "one element" in error_line(done)


def test_module_runs_as_a_program(factories):
    command = [sys.executable, "-m", "memopt", "report", f"{factories}:workload", "--budget", "100KB", "--no-advice"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 3
    assert "Does not fit" in done.stdout


@pytest.mark.parametrize(
    ("module", "group"),
    [
        ("", "(root)"),
        ("model.layers.3.mlp.up_proj", "model.layers.*.mlp"),
        ("encoder.embed.tokens", "encoder.embed"),
        ("0", "*"),
        ("blocks.1.layers.22", "blocks.*.layers.*"),
    ],
)
def test_like_modules_share_a_group(module, group):
    assert module_group(module) == group


def test_ops_are_called_by_their_short_names():
    assert op_name("aten.mul.Tensor") == "mul"
    assert op_name("mylib.scale.default") == "mylib::scale"
