"""Which parameters of a stage are trained, and where these and the others lie.

What is trained has a flat vector of its own: contributions, votes and momentum are made of it alone. The
others, frozen, lie in a second one that no method sees (state_layout.py). No torch.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

from swarmnet.model.flat_layout import Layout, layout_of
from swarmnet.model.parameters import is_factor, parameter_shapes, whole
from swarmnet.run.manifest import Manifest, ManifestError


def has_frozen(manifest: Manifest) -> bool:
    """Whether the run says what is trained: else all is."""
    return bool(manifest.sync.trainable) or manifest.model.lora.rank > 0


def is_trained(manifest: Manifest, name: str) -> bool:
    """Whether the parameter of this name is."""
    patterns, has_factors = manifest.sync.trainable, manifest.model.lora.rank > 0
    if not has_frozen(manifest):
        return True
    return (has_factors and is_factor(name)) or any(fnmatchcase(name, pattern) for pattern in patterns)


def trained_layout(manifest: Manifest, stage: int) -> Layout:
    """Of what the stage trains."""
    return _layout(manifest, stage, trained=True)


def frozen_layout(manifest: Manifest, stage: int) -> Layout:
    """Of what stays as it began; of size 0 where all is trained."""
    return _layout(manifest, stage, trained=False)


def _layout(manifest: Manifest, stage: int, *, trained: bool) -> Layout:
    shapes = parameter_shapes(manifest.model, manifest.span(stage))
    return layout_of({name: size for name, size in shapes.items() if is_trained(manifest, name) is trained})


def check_trained(manifest: Manifest) -> None:
    """Raise ManifestError where `sync.trainable` names what is not there, or leaves a stage nothing to train.
    After `manifest_check.check`."""
    patterns = manifest.sync.trainable
    if not patterns:
        return
    names = list(parameter_shapes(manifest.model, whole(manifest.model)))
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ManifestError(
                f"sync.trainable: no parameter is called {pattern!r}; they have names as "
                f"{names[min(1, len(names) - 1)]}"
            )
    for stage in range(len(manifest.stages)):
        shapes = parameter_shapes(manifest.model, manifest.span(stage))
        if not any(is_trained(manifest, name) for name in shapes):
            raise ManifestError(f"sync.trainable: stage {stage} has nothing to train; name a parameter of it")
