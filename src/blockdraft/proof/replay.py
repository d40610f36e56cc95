"""A certificate, run again: with which settings, and what came out differently.

Loads no model library.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from blockdraft.core.config import LLMConfig
from blockdraft.core.errors import ConfigError, why_unread
from blockdraft.core.files import read_json
from blockdraft.core.machine import num_cpus
from blockdraft.core.words import counted
from blockdraft.proof.config import ProofConfig

KIND = "blockdraft proof"
FORMAT = 1
_NEEDED: Mapping[str, type] = {
    **dict.fromkeys(("config", "proof", "hashes", "versions", "machine", "kernels"), dict),
    "cases": list,
    "threads": int,
}


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that is not as it was.

    area: machine, card, versions, hashes, kernels or outputs.
    """

    area: str
    name: str
    before: Any
    now: Any


def read_certificate(path: Path) -> dict[str, Any]:
    """Read a certificate that is to be replayed.

    Raises:
        ConfigError: the file cannot be read, or is none of this format.
    """
    remedy = "give a file that `blockdraft prove --output FILE` wrote"
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {why_unread(error)}; {remedy}") from error
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ConfigError(f"{path} is not a certificate of a proof; {remedy}")
    if found.get("format") != FORMAT:
        raise ConfigError(
            f"{path} has format {found.get('format')!r}, and this version reads {FORMAT}; "
            "replay it with the version that wrote it"
        )
    if missing := [name for name in _NEEDED if name not in found]:
        raise ConfigError(f"{path} lacks {', '.join(missing)}; {remedy}")
    # What only the comparison needs would be found damaged after all has been decoded again.
    odd = [name for name, kind in _NEEDED.items() if not isinstance(found[name], kind)]
    if not odd and not all(map(_is_case, found["cases"])):
        odd = ["cases"]
    if odd:
        raise ConfigError(f"{path} has damaged {', '.join(odd)}; {remedy}")
    return found


def _is_case(value: object) -> bool:
    if not isinstance(value, dict) or not isinstance(value.get("id"), str):
        return False
    return "output" in value and isinstance(value["output"], str | None)


def settings_of(certificate: Mapping[str, Any]) -> tuple[LLMConfig, ProofConfig, list[Path]]:
    """The pair, the proof and the user's prompts of a certificate.

    Raises:
        ConfigError: a value is not usable.
    """
    try:
        pair = _fields(LLMConfig, certificate["config"])
        # As many threads as ran then, whatever this machine would take.
        pair = pair | {"num_threads": _threads_of(certificate)}
        proof = dict(certificate["proof"])
        paths = _paths(proof.pop("prompts"))
        return LLMConfig(**pair), ProofConfig(**_fields(ProofConfig, proof)), paths
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"the certificate's settings are damaged ({error}); make a new one"
        ) from error


def _paths(value: object) -> list[Path]:
    if not isinstance(value, list):
        raise TypeError(f"prompts is {value!r:.60}")
    return [Path(path) for path in value]


def _threads_of(certificate: Mapping[str, Any]) -> int:
    threads, cores = int(certificate["threads"]), num_cpus()
    if threads > cores:
        raise ConfigError(
            f"the certificate was made with {threads} threads, and this process may use "
            f"{counted(cores, 'core')}; replay it where there are {threads}"
        )
    return threads


def _fields(kind: type[LLMConfig] | type[ProofConfig], values: Mapping[str, Any]) -> dict[str, Any]:
    return {field.name: values[field.name] for field in fields(kind)}


def compare(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """What differs between a certificate and its replay, for JSON.

    Outputs are compared of the cases that both have decoded, which are counted. One that a whole
    replay lacks is another output too: its prompt has changed, or is not asked any more.
    """
    outputs = [_outputs(certificate) for certificate in (before, now)]
    both = sorted(outputs[0].keys() & outputs[1].keys())
    compared = both if now["partial"] else sorted(outputs[0])
    changes = [
        *_changed("machine", before["machine"], now["machine"]),
        # Certificates of earlier versions do not name it.
        *_changed("card", before.get("card", {}), now.get("card", {})),
        *_changed("versions", before["versions"], now["versions"]),
        *_changed("hashes", before["hashes"], now["hashes"]),
        *_changed("kernels", before["kernels"], now["kernels"]),
        *_changed(
            "outputs", *({case_id: own.get(case_id) for case_id in compared} for own in outputs)
        ),
    ]
    return {
        "date": before.get("date"),
        "num_cases": len(before["cases"]),
        "num_compared": len(both),
        "changes": [asdict(change) for change in changes],
    }


def _outputs(certificate: Mapping[str, Any]) -> dict[str, str]:
    return {c["id"]: c["output"] for c in certificate["cases"] if c["output"] is not None}


def _changed(area: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Change]:
    names = sorted(before.keys() | now.keys())
    pairs = [(name, before.get(name), now.get(name)) for name in names]
    return [Change(area, name, one, other) for name, one, other in pairs if one != other]
