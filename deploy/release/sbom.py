"""The CycloneDX list of what the wheels need, from what is installed, and of the models in them."""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
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
from packaging.utils import NormalizedName, canonicalize_name

EXTRAS = ("proxy", "engine", "lab", "detectors", "otel")
"""Extras that run in one environment; SGLang and vLLM bring environments of their own."""


def components(wheels: Sequence[Path], at: datetime) -> str:
    """Return the document as JSON; the same for the same wheels, packages and time.

    Args:
        wheels: the files, first that of the distribution whose extras bring the others; their
            packages are those of the interpreter that runs this.
        at: time of the wheels' commit, which stands in the document for the time of the build.

    Raises:
        PackageNotFoundError: a package that a wheel requires isn't installed.
    """
    digests = {_name_of(wheel): hashlib.sha256(wheel.read_bytes()).hexdigest() for wheel in wheels}
    own = distribution(_name_of(wheels[0]))
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, " ".join(digests.values())))
    bom.metadata.timestamp = at
    bom.metadata.component = root = _component(own, digests)
    for wheel in wheels:
        bom.components.update(_models(wheel))
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
                known[name] = _component(found, digests)
                bom.components.add(known[name])
            bom.register_dependency(component, [known[name]])
            if (name, wanted) not in visited:
                visited.add((name, wanted))
                left.append((found, wanted))
    return JsonV1Dot6(bom).output_as_string(indent=2) + "\n"


def _name_of(wheel: Path) -> NormalizedName:
    return canonicalize_name(wheel.name.partition("-")[0])


def _requirements(of: Distribution, extras: frozenset[str]) -> Iterator[Requirement]:
    """Yield what a package requires on this kind of machine, with these extras."""
    for line in of.requires or ():
        requirement = Requirement(line)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def _component(found: Distribution, digests: Mapping[NormalizedName, str]) -> Component:
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
        hashes=[_sha256(digests[name])] if name in digests else [],
    )


def _sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)


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
                    hashes=[_sha256(digest)],
                    properties=[Property(name="leyline:path", value=path)],
                )
