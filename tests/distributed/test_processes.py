"""Two processes that share a model end where one with the whole batch does: weights, gates, sparsity, records."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import state_dict as states

import blockgate as bg
from tests.distributed import scenarios
from tests.distributed.processes import run

LEARN = ("ddp", "ddp_again", "fsdp", "revived_ddp", "revived_fsdp")
TOGETHER = (*LEARN, "mixed", "mixed_ddp", "saved", "ddp_state", "refusals", "edited")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def together(folder):
    """What two processes found."""
    return run(2, folder, *TOGETHER)


def assert_near(found, expected, name):
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=lambda message: f"{name}: {message}")


def assert_same(found, expected):
    assert found["state"].keys() == expected["state"].keys()
    for name, value in expected["state"].items():
        # Averages over processes are summed in another order.
        assert_near(found["state"][name], value, name)
    assert_near(found["output"], expected["output"], "output")
    assert found["counts"].keys() == expected["counts"].keys()
    for name, (rows, counts) in expected["counts"].items():
        assert found["counts"][name][0] == rows, name
        assert torch.equal(found["counts"][name][1], counts), name


@pytest.mark.parametrize("name", LEARN)
def test_two_processes_learn_as_one(name, together, folder):
    alone = getattr(scenarios, name)(folder)
    before = scenarios.gated().state_dict()
    assert not torch.equal(before["blocks.0.first.gate.key_mean"], alone["state"]["blocks.0.first.gate.key_mean"])
    assert float(alone["state"]["blocks.0.first.gate.sparsity"]) == 0.75
    for of_process in together[name]:
        assert_same(of_process, alone)


@pytest.mark.parametrize("name", ["balance", "revive"])
def test_what_the_scenarios_add_changes_the_weights(name):
    plain, more = (scenarios.trained(scenarios.gated(), **how)["state"] for how in ({}, {name: True}))
    assert not torch.equal(plain["blocks.1.first.gate.bias"], more["blocks.1.first.gate.bias"])


@pytest.mark.parametrize("name", ["mixed", "mixed_ddp"])
def test_mixed_precision_is_the_same_in_both_processes_and_near_float32(name, together):
    one, two = together[name]
    alone = scenarios.trained(scenarios.gated(torch.float32))
    for name, value in one["state"].items():
        assert torch.equal(value, two["state"][name]), name
        assert value.dtype == alone["state"][name].dtype
        assert value.isfinite().all()
    assert torch.equal(one["output"], two["output"])
    torch.testing.assert_close(one["output"].float(), alone["output"], rtol=0.1, atol=0.3)
    # Farther than the order of sums takes them.
    weight = "blocks.0.first.weight"
    assert (one["state"][weight] - alone["state"][weight]).abs().max() > 1e-4


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_checkpoints_load_into_any_number_of_processes(together, folder):
    one, two = together["saved"]
    assert_same(two["end"], one["end"])
    for found in (scenarios.loaded(folder), *run(4, folder, "loaded")["loaded"]):
        assert_same(found["half"], one["half"])
        assert_same(found["end"], one["end"])


def test_sharded_models_save_whole(together, folder):
    half = together["saved"][0]["half"]
    torch.manual_seed(3)
    model = bg.load_pretrained(folder / "pretrained", scenarios.Net().double())
    assert model.state_dict().keys() == half["state"].keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, half["state"][name]), name
    assert bg.pack(model).blocks[0].first.gate.target_sparsity == model.blocks[0].first.sparsity


def test_states_pass_through_ddp(together):
    for found in together["ddp_state"]:
        assert_same(found["other"], found["one"])
        assert float(found["other"]["state"]["blocks.1.second.gate.sparsity"]) == 0.75


def test_inference_with_shards_follows_edits(together):
    for found in together["edited"]:
        for sharded, whole in zip(found["sharded"], found["whole"], strict=True):
            torch.testing.assert_close(sharded, whole, rtol=1e-4, atol=1e-5)
        assert not torch.equal(*found["sharded"])
        assert found["why"] == "fully_shard hands out whole weights for one call only"


def test_what_shards_cannot_do_is_said(together):
    for rank, said in enumerate(together["refusals"]):
        for name in ("pack", "pack after a call"):
            assert "pack: expected a model whose tensors are whole" in said[name]
        assert "sharded: gate the model first, and call fully_shard then" in said["sparsify"]
        for name in ("load", "load after a call"):
            assert "Load first and shard then" in said[name]
        assert "share_means(model) in every process" in said["means"]
        assert "directory: expected a folder" in said["write"]
        assert said["write"].startswith("the first process failed: ") is (rank == 1)
        assert said["again"] == "nothing"


def test_one_process_without_a_group_has_a_state_dict_too():
    net = scenarios.gated()
    bg.set_sparsity(net, 0.75)
    state = states.get_model_state_dict(net)
    other = scenarios.gated(seed=2)
    states.set_model_state_dict(other, state)
    for name, value in other.state_dict().items():
        assert torch.equal(value, net.state_dict()[name]), name
    assert other.blocks[0].first.sparsity == 0.75
