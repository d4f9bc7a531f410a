"""Each package that `make setup` installs has a licence that is known, and none binds those who use lakeupsert.

`make sbom` writes what the packages say of themselves; this test reads the same metadata.
"""

import re
from importlib import metadata
from pathlib import Path

LOCK = (Path(__file__).parents[2] / "requirements.lock").read_text()
FREE = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "CC0",
        "CC0-1.0",
        "CNRI-Python",
        "MIT",
        "MIT-0",
        "PSF-2.0",
        "Zlib",
    ),
    *("3-Clause BSD License", "Apache License 2.0", "Apache Software License", "BSD License", "MIT License"),
    *("MIT No Attribution License (MIT-0)", "Python Software Foundation License"),
    *("EPL-2.0", "MPL-2.0", "Mozilla Public License 2.0 (MPL 2.0)"),  # of changes to the package's own files
}


def is_free(stated: str) -> bool:
    """Whether one of the licences that a package offers is free in all its parts."""
    return any(set(offer.split(" AND ")) <= FREE for offer in stated.split(" OR "))


def stated(package: str) -> str:
    """The licence by a package's metadata: an expression, its classifiers, or its text."""
    given = metadata.metadata(package)
    classified = [c.rpartition(" :: ")[2] for c in given.get_all("Classifier", []) if c.startswith("License ::")]
    named = [one for one in classified if one != "OSI Approved"]
    return given.get("License-Expression") or " OR ".join(named) or given.get("License") or "none stated"


def test_licence_of_each_package_is_known_and_free() -> None:
    locked = set(re.findall(r"^([a-z0-9._-]+)==", LOCK, re.MULTILINE))
    installed = {
        name for one in metadata.distributions() if (name := re.sub(r"[-_.]+", "-", one.name).lower()) in locked
    }
    assert len(installed) > 150
    assert {name: stated(name) for name in installed if not is_free(stated(name))} == {}


def test_licences_that_bind_users_are_not_free() -> None:
    for one in ("GPL-3.0-only", "AGPL-3.0-or-later", "MIT AND GPL-2.0-only", "none stated", "SSPL-1.0"):
        assert not is_free(one), one
    assert is_free("EPL-2.0 OR GPL-2.0-or-later")
