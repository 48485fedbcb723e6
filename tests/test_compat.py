"""What the patches of PyLate and colpali-engine ask before they take a call over."""

import importlib.metadata

import pytest
import torch

from late_interaction._compat import package_at_least, served


@pytest.mark.parametrize(
    ("installed", "minimum", "is_later"),
    [
        ("1.5.1", "1.5.1", True),
        ("1.10.0", "1.5.1", True),  # by number, not by letter
        ("1.5", "1.5.1", False),
        ("1.5.0.post1", "1.5.1", False),
        ("1.5.1rc1", "1.5.1", True),  # what the release will have
        ("2", "1.5.1", True),
        ("unknown", "1.5.1", False),
    ],
)
def test_releases_are_compared_by_number(monkeypatch, installed, minimum, is_later):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: installed)
    assert package_at_least("some-package", minimum) is is_later


def test_a_package_that_is_not_installed_is_no_release():
    assert not package_at_least("no-such-package-anywhere", "0")


Q, D = torch.randn(2, 3, 8), torch.randn(4, 5, 8)
REFUSED = {
    "integers": (Q.int(), D.int()),
    "two dtypes": (Q, D.bfloat16()),
    "two devices": (Q, D.to("meta")),
    "a device without kernels": (Q.to("meta"), D.to("meta")),
    "two widths": (Q, D[..., :5]),
    "nothing": (Q[:0], D),
    "documents of no token": (Q, D[:, :0]),
}


def test_embeddings_are_served(device, monkeypatch):
    q, d = Q.to(device), D.to(device)
    assert all(
        served(q.to(t), d.to(t)) for t in (torch.bfloat16, torch.float16, torch.float32, torch.float64)
    )
    with torch.autocast(device, torch.bfloat16):
        assert served(q, d.bfloat16())
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "0")
    assert served(q, d)
    monkeypatch.setenv("LATE_INTERACTION_DISABLE", "1")
    assert not served(q, d)


@pytest.mark.parametrize("what", REFUSED)
def test_the_rest_is_not(what):
    assert not served(*REFUSED[what])


@pytest.mark.gpu
def test_a_gpu_without_kernels_is_not_served(monkeypatch):
    from late_interaction import _compat

    _compat._has_kernels.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    try:
        assert not served(Q.cuda(), D.cuda())
    finally:
        _compat._has_kernels.cache_clear()
