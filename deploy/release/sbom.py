"""The wheel's components as CycloneDX: the packages it is tested with, and the models it ships."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator
from datetime import datetime
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

EXTRAS = ("proxy", "engine", "detectors", "otel")
"""Extras that run in one environment; SGLang and vLLM bring environments of their own."""


def components(wheel: Path, at: datetime) -> str:
    """Return the document as JSON; the same for the same wheel, packages and time.

    Args:
        wheel: the file; its packages are those of the interpreter that runs this.
        at: time of the wheel's commit, which stands in the document for the time of the build.

    Raises:
        PackageNotFoundError: a package that the wheel requires isn't installed.
    """
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    own = distribution(canonicalize_name(wheel.name.partition("-")[0]))
    root = _component(own)
    root.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=digest))
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, digest))
    bom.metadata.timestamp = at
    bom.metadata.component = root
    for model in _models(wheel):
        bom.components.add(model)
    known = {canonicalize_name(own.metadata["Name"]): root}
    visited = set[tuple[str, frozenset[str]]]()
    left = [(own, frozenset(EXTRAS))]
    while left:
        package, extras = left.pop()
        component = known[canonicalize_name(package.metadata["Name"])]
        for requirement in _requirements(package, extras):
            found = distribution(requirement.name)
            name, wanted = canonicalize_name(requirement.name), frozenset(requirement.extras)
            if name not in known:
                known[name] = _component(found)
                bom.components.add(known[name])
            bom.register_dependency(component, [known[name]])
            if (name, wanted) not in visited:
                visited.add((name, wanted))
                left.append((found, wanted))
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _requirements(of: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield what a package requires on this kind of machine, with these extras."""
    for line in of.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _component(found: Distribution) -> Component:
    name = canonicalize_name(found.metadata["Name"])
    # A build for another kind of machine, such as PyTorch's `+cpu`, is the same component.
    version = found.version.partition("+")[0]
    purl = PackageURL("pypi", "", name, version)
    return Component(
        name=name,
        version=version,
        type=ComponentType.LIBRARY,
        purl=purl,
        bom_ref=str(purl),
        description=_field(found, "Summary"),
        licenses=_licences(found),
    )


def _field(found: Distribution, name: str) -> str | None:
    fields: list[str] = found.metadata.get_all(name) or []
    return fields[0] if fields else None


def _licences(found: Distribution) -> list[LicenseExpression]:
    """Return the licence if a package gives it as an expression of SPDX."""
    expression = _field(found, "License-Expression")
    return [LicenseExpression(expression)] if expression else []


def _models(wheel: Path) -> Iterator[Component]:
    with ZipFile(wheel) as opened:
        for path in sorted(opened.namelist()):
            if path.endswith(".safetensors"):
                digest = hashlib.sha256(opened.read(path)).hexdigest()
                yield Component(
                    name=f"leyline-recall-{Path(path).parent.name}",
                    version=digest[:12],
                    type=ComponentType.MACHINE_LEARNING_MODEL,
                    bom_ref=path,
                    hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
                    properties=[Property(name="leyline:path", value=path)],
                )
