"""Each check of the doctor, broken on purpose by made-up facts."""

from __future__ import annotations

import dataclasses
import os
import socket
from pathlib import Path

import pytest

from freewheel.errors import ConfigError
from freewheel.runtime.doctor import probe as looking
from freewheel.runtime.doctor.bandwidth import LinkFigure
from freewheel.runtime.doctor.probe import LOOPBACK, Cuda, Facts, gather
from freewheel.runtime.doctor.rules import diagnose

GOOD = LinkFigure(latency_ms=0.2, mbit_out=9400.0, mbit_in=9300.0, clock_skew_ms=3.0)
AWAY = {"bind": "10.0.0.1", "links": {"10.0.0.2:29600": GOOD}}


def found(workers=4, model_mb=None, tls=False, **changed):
    rows = diagnose(dataclasses.replace(Facts(), **changed), workers, model_mb, tls)
    names = [row.what for row in rows]
    assert len(names) == len(set(names))
    return {row.what: row for row in rows}


def link(**changed):
    return {"bind": "10.0.0.1", "links": {"far:29600": dataclasses.replace(GOOD, **changed)}}


def test_a_good_host_has_nothing_to_complain_of():
    for rows in (found(), found(**AWAY), found(model_mb=100, tls=True, port=29500, **AWAY)):
        assert {row.state for row in rows.values()} == {"ok"}
        assert not any(row.advice for row in rows.values())


BROKEN = [
    ("torch", {"torch": "2.7.1+cu126"}, "problem", "pip install 'torch>=2.8,<2.14'"),
    ("torch", {"torch": "2.14.0"}, "problem", "<2.14"),
    ("cuda", {"cuda": Cuda(None, driver=True)}, "warning", "build of torch with CUDA"),
    ("cuda", {"cuda": Cuda("12.8", True, (), "The NVIDIA driver on your system is too old (found version …")},
     "problem", "Update the driver"),
    ("cuda", {"cuda": Cuda("12.8", True, ("H200",), "CUDA error: uncorrectable ECC error")}, "problem",
     "nvidia-smi"),
    ("cuda", {"cuda": Cuda("12.8", True)}, "warning", "CUDA_VISIBLE_DEVICES"),
    ("cuda", {"cuda": Cuda("12.8", True, (), "No CUDA GPUs are available")}, "warning", "--gpus all"),
    ("cores", {"cores": 2}, "warning", "smaller -n"),
    ("threads", {"omp": "4"}, "warning", "set it to 1"),
    ("threads", {"omp": "many"}, "problem", "whole number"),
    ("threads", {"omp": "0"}, "problem", "above 0"),
    ("listening", {"bind": "10.9.9.9", "bind_problem": "no address 10.9.9.9"}, "problem", "10.9.9.9"),
    ("listening", {**AWAY, "bind": "127.0.0.1"}, "warning", "--bind"),
    ("port", {"port": 29500, "port_problem": "port 29500 is in use"}, "problem", "in use"),
    ("firewall", {**AWAY, "firewalls": ("ufw",)}, "warning", "ip_local_port_range"),
    ("firewall", {"bind": "10.0.0.1", "firewalls": ("firewalld",)}, "warning", "Let others in"),
    ("link to far:29600", {**AWAY, "links": {"far:29600": "no route to host"}}, "problem", "no route"),
    ("link to far:29600", link(mbit_in=20.0), "warning", "exchange rarely"),
    ("link to far:29600", link(mbit_out=20.0), "warning", "exchange rarely"),
    ("link to far:29600", link(latency_ms=80.0), "warning", "A long way"),
    ("link to far:29600", link(clock_skew_ms=-4000.0), "warning", "NTP"),
    ("link to far:29600", {"tls": True, **link(clock_skew_ms=400_000.0)}, "problem", "Keys"),
    ("open files", {"workers": 256, "cores": 256, "open_files": 1024}, "problem", "ulimit -n 2112"),
    ("windows", {"window_problem": "Operation not permitted"}, "problem", "seccomp"),
    ("windows", {"sharing_problem": "Permission denied"}, "warning", "sockets"),
    ("/dev/shm", {"shared_free_mb": 64.0}, "warning", "--shm-size"),
    ("/dev/shm", {"shared_free_mb": 0.0}, "warning", "tmpfs"),
    ("memory", {"model_mb": 4000.0}, "problem", "fewer workers"),
    ("disk", {"folder_problem": "/root cannot be written to"}, "problem", "--folder"),
    ("disk", {"disk_free_mb": 10.0}, "warning", "200 MB"),
]  # fmt: skip


@pytest.mark.parametrize(("what", "changed", "state", "advice"), BROKEN)
def test_each_fault_is_found_alone_and_says_what_to_do(what, changed, state, advice):
    rows = found(**changed)
    assert rows[what].state == state
    assert advice in rows[what].advice
    others = {name: row for name, row in rows.items() if name != what and row.state != "ok"}
    assert not others


def test_every_check_is_broken_by_some_row():
    everything = found(port=29500, **AWAY)
    checks = {name.split(" to ")[0] for name in everything} - {"python"}  # which nothing can break
    assert {what.split(" to ")[0] for what, *_ in BROKEN} == checks


def test_a_host_without_a_gpu_is_no_worse_for_it():
    assert found(cuda=Cuda("12.8", False, (), "Found no NVIDIA driver"))["cuda"].state == "ok"
    assert "H200" in found(cuda=Cuda("12.8", True, ("H200",)))["cuda"].value


def test_the_number_of_workers_counts_all_hosts_where_they_connect():
    alone, three = found(workers=8), found(workers=8, links={"a:1": GOOD, "b:1": GOOD}, bind="10.0.0.1")
    assert "128 needed" in alone["open files"].value
    assert "256 needed" in three["open files"].value
    assert "8 workers" in three["cores"].value


def test_loopback_asks_for_no_firewall():
    rows = found(firewalls=("ufw",), links={LOOPBACK: GOOD})
    assert "firewall" not in rows
    assert rows["loopback"].state == "ok"


def test_a_link_says_how_long_the_model_takes():
    assert "100 MB take 0.086 s" in found(model_mb=100, **AWAY)["link to 10.0.0.2:29600"].value


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [
        ("2.8", ">=2.8,<2.14", True),
        ("2.13.1+cpu", ">=2.8,<2.14", True),
        ("2.14.0a0+git123", ">=2.8,<2.14", False),
        ("2.9.0", "<2.14,>=2.8", True),
        ("2.10.0", ">2.9", True),
        ("3", "==3.0.0", True),
        ("3.1", "!=3.1", False),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_their_numbers(version, bounds, expected):
    assert found(torch=version, torch_range=bounds)["torch"].state == ("ok" if expected else "problem")


# -- looking at a real host --


def test_what_is_found_on_this_host_makes_sense(tmp_path):
    seen = gather([], folder=tmp_path / "new" / "runs", mb=0.5)
    assert found(torch=seen.torch, torch_range=seen.torch_range)["torch"].state == "ok"
    assert seen.torch_range
    assert 1 <= seen.cores <= len(os.sched_getaffinity(0))
    assert seen.bind_problem is seen.window_problem is seen.sharing_problem is seen.folder_problem is None
    assert seen.memory_free_mb > 10
    assert seen.disk_free_mb > 1
    assert seen.links[LOOPBACK].mbit_out > 1


def test_a_taken_port_an_address_of_others_and_a_deaf_host_are_seen():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        seen = gather([], bind="127.0.0.1", port=port, mb=0.1)
    assert "in use" in seen.port_problem
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and not listening: refused
        seen = gather([("127.0.0.1", nobody.getsockname()[1])], bind="192.0.2.1", mb=0.1)
    assert "192.0.2.1" in seen.bind_problem
    (why,) = seen.links.values()
    assert "doctor --serve" in why


def test_another_system_is_refused(monkeypatch):
    monkeypatch.setattr(looking.platform, "system", lambda: "Darwin")
    with pytest.raises(ConfigError, match="Linux, not on Darwin"):
        gather([])


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "file").write_text("")
    assert "/file: " in gather([], folder=tmp_path / "file" / "runs", mb=0.1).folder_problem


@pytest.mark.parametrize(
    ("quota", "expected"), [("max 100000", None), ("150000 100000", 1), ("50000 100000", 1)]
)
def test_a_container_s_share_of_the_cores_counts(quota, expected, tmp_path, monkeypatch):
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(looking, "QUOTA", Path(tmp_path / "cpu.max"))
    assert gather([], mb=0.1).cores == (expected or len(os.sched_getaffinity(0)))
