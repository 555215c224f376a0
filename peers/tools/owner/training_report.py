"""The public summary of training content, in the order of the European Commission's template.

Article 53(1)(d) of Regulation (EU) 2024/1689 requires it of providers of general-purpose AI models. The
template was published on 24 July 2025. It has three sections: general information, list of data sources, data
processing. It does not ask for compute, energy and contributors. These follow in an additional section, with
the assumptions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from peers.data.documents import HELD_OUT
from peers.telemetry.console import counted
from peers.tools.owner import run_facts as assumptions
from peers.tools.owner.objections import disputed_documents
from peers.tools.owner.run_facts import RunFacts
from swarmnet.model.parameters import has_frozen
from swarmnet.run.manifest import Manifest
from swarmnet.run.schema import STANDARD_LIBRARY, Data, TextSource

TEMPLATE = "Article 53(1)(d) of Regulation (EU) 2024/1689"
NOT_STATED = "not stated by the run's creator"
KINDS = (
    ("public", "2.1 Publicly available datasets"),
    ("licensed", "2.2.1 Datasets licensed commercially by rightsholders"),
    ("private", "2.2.2 Private datasets obtained from other third parties"),
    ("crawled", "2.3 Data crawled and scraped from online sources"),
    ("users", "2.4 User data"),
    ("synthetic", "2.5 Synthetic data"),
    ("other", "2.6 Other sources of data"),
)
MAX_PEERS = 20
"""Maximum number of peers whose reading is listed: those that have read most."""
_SIZES = ((10**9, "less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))


def summary(facts: RunFacts) -> dict[str, Any]:
    """Return the summary as plain data for JSON."""
    manifest, order = facts.manifest, facts.order
    known = [source.bytes for source in manifest.data.sources if source.bytes]
    complete = len(known) == len(manifest.data.sources)
    return {
        "template": TEMPLATE,
        "made": facts.made_at.isoformat(timespec="seconds"),
        "from": facts.origin,
        "general": {
            "model": manifest.name,
            "version": f"run {facts.signed.run_id}, "
            + (
                f"settled by all stages up to round {facts.round}"
                if facts.round >= 0
                else "no settled round known"
            ),
            "provider": manifest.provider.name or NOT_STATED,
            "contact": manifest.contact or NOT_STATED,
            "representative": manifest.provider.representative or NOT_STATED,
            "licence": manifest.license or NOT_STATED,
            "owner_key": manifest.owner,
            "intended_use": manifest.intended_use or NOT_STATED,
            "modality": "text",
            "text_bytes": sum(known) if complete else None,
            "text_size_range": _size(sum(known)) if complete and manifest.data.tokenizer == "bytes" else None,
            "tokenizer": manifest.data.tokenizer,
            "languages": _joined(source.languages for source in manifest.data.sources),
            "latest_collection": max((source.collected for source in manifest.data.sources), default="")
            or NOT_STATED,
            "built_on": _built_on(manifest),
        },
        "sources": [asdict(source) for source in manifest.data.sources],
        "coverage": _coverage(facts),
        "processing": {
            "steps": _joined(f"{s.name}: {s.processing}" for s in manifest.data.sources if s.processing),
            "withdrawn_documents": [asdict(withdrawal) for withdrawal in order.withdrawn],
            "withdrawal": "A signed order of the run's owner names documents by their SHA-256; they are left "
            "out from then on. What was learnt from them before is not undone.",
            "held_out": _held_out(manifest),
            "copyright_policy": manifest.provider.copyright_policy or NOT_STATED,
            "opt_outs": manifest.provider.opt_outs or NOT_STATED,
            "illegal_content": manifest.provider.illegal_content or NOT_STATED,
            "objections": _objections(facts),
            "privacy": _privacy(manifest.data),
        },
        "compute": {
            "parameters": facts.parameters,
            "active_parameters": facts.active_parameters,
            **_trained(facts),
            "assumptions": [*_assumptions(facts), *facts.assumed],
        },
        "contributors": [asdict(one) for one in facts.contributors],
        "experts": _experts(facts),
        "bans": len(order.bans),
    }


def _held_out(manifest: Manifest) -> str:
    """Return which text the program holds out of training: modules of the one source that it knows."""
    if all(source.path != STANDARD_LIBRARY for source in manifest.data.sources):
        return "no text was held out by the program"
    return f"of the source {STANDARD_LIBRARY} these modules are left out: {', '.join(HELD_OUT)}"


def _objections(facts: RunFacts) -> dict[str, int] | None:
    """Return how many documents third persons object to; None: it was not looked up."""
    if facts.objections is None:
        return None
    documents = disputed_documents(facts.objections, facts.order)
    return {
        "objections": len(facts.objections),
        "documents": len(documents),
        "withdrawn": sum(document.withdrawn for document in documents),
    }


def _privacy(data: Data) -> str:
    """Return how private text is protected; empty if the text is not private."""
    if not data.private:
        return ""
    text = "each owner's text stayed on its machine, and no other peer compared, named or hashed it"
    if not data.adds_noise:
        return f"{text}; what owners sent of their training had no noise"
    privacy = data.privacy
    return (
        f"{text}; all that an owner sent is ({privacy.epsilon:g}, {privacy.delta:g})-differentially private "
        f"for each of its documents, which was used at most {privacy.epochs} times"
    )


def _built_on(manifest: Manifest) -> str:
    start, lora = manifest.init_checkpoint, manifest.model.lora
    if not start.path:
        return "no other model: the weights start from the run's seed"
    how = f", of which LoRA factors of rank {lora.rank} are trained" if lora.rank else ""
    return f"{start.path} ({start.origin or 'origin not stated'}), SHA-256 {start.sha256}{how}"


def _experts(facts: RunFacts) -> dict[str, Any] | None:
    """Return the facts about experts; None: the model has none."""
    experts = facts.manifest.model.experts
    if not experts.num_experts:
        return None
    return {
        "count": experts.num_experts,
        "active": experts.top_k,
        "groups": experts.groups,
        "trained": [
            {
                "stage": one.stage,
                "first": one.first,
                "last": one.last,
                "holders": one.holders,
                "round": one.trained,
                "stale_rounds": one.stale_rounds,
            }
            for one in facts.experts
        ],
    }


def _coverage(facts: RunFacts) -> dict[str, Any]:
    """Return how much of the text was read."""
    data = facts.manifest.data
    if data.sampling == "random":
        how = "sequences are drawn from anywhere in the text; the parts already read are not counted"
        return {"order": data.sampling, "how": how, "peers": []}
    peers = [
        {"shards": shards, "shards_read": read, "epochs": round(read / shards, 3)}
        for shards, read in sorted(facts.read, key=lambda one: (-one[1] / one[0], one))
    ]
    how = "each peer of the first stage reads every shard that it has once, and then all of them again"
    return {"order": data.sampling, "how": how, "peers": peers}


def _trained(facts: RunFacts) -> dict[str, float | None]:
    """Return the compute and energy of the training; None: unknown. The manifest alone does not say how long
    the run has trained."""
    known = facts.round >= 0
    return {
        "settled_rounds": facts.rounds[0] + 1 if known else None,
        "tokens": facts.tokens if known else None,
        "floating_point_operations": facts.flops if known else None,
        "energy_kilowatt_hours": facts.kilowatt_hours if known else None,
    }


def _assumptions(facts: RunFacts) -> list[str]:
    """Return sentences that say how the report's numbers were computed."""
    each = ", ".join(
        f"{share:.0%} of the work on GPUs by their own measurement"
        if device == assumptions.MEASURED
        else f"{share:.0%} of the work on {assumptions.DEVICES[device]} at "
        f"{assumptions.FLOPS_PER_JOULE[device]:.0e} operations per joule"
        for device, share in sorted(facts.devices.items())
    )
    measured = set(facts.devices) == {assumptions.MEASURED}
    return [
        "tokens: those that contributions in settled rounds of the first stage, which every token visits, "
        "say they stand for"
        if facts.is_counted
        else "tokens: at most; settled rounds of the first stage, which every token visits, times the run's "
        "target of tokens per round, as no peer has counted them (rounds that are closed by time have fewer)",
        f"operations: {assumptions.FLOPS_PER_PARAMETER_AND_TOKEN} x active parameters of a token x tokens, "
        "for each stage by its own settled rounds"
        + ("; frozen parameters are counted like trained ones" if has_frozen(facts.manifest) else ""),
        f"energy: {each}, by the devices that contributors report (processors if they report none), "
        f"times {assumptions.OVERHEAD:g} for the rest of the machines"
        + ("" if measured else ", which is assumed where nothing was measured"),
        "contributors: tokens as their own signed records claim, not audited",
    ]


def _joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(text for text in texts if text)) or NOT_STATED


def _size(tokens: int) -> str:
    return next((words for limit, words in _SIZES if tokens < limit), "more than 10 trillion tokens")


def as_json(facts: RunFacts) -> str:
    return json.dumps(summary(facts), indent=2, ensure_ascii=False) + "\n"


def as_markdown(facts: RunFacts) -> str:
    """Return the summary in Markdown, for people."""
    report = summary(facts)
    general, processing, compute = report["general"], report["processing"], report["compute"]
    size = f"{general['text_bytes']:,} bytes" if general["text_bytes"] is not None else NOT_STATED
    if general["text_size_range"]:
        size += f" ({general['text_size_range']})"
    lines = [
        f"# Public summary of training content: {_plain(general['model'])}",
        "",
        f"After the template for {TEMPLATE}. Made {report['made']} from {report['from']}.",
        "",
        "## 1. General information",
        "",
        f"- Provider: {_plain(general['provider'])}; contact: {_plain(general['contact'])}",
        f"- Authorised representative in the EU: {_plain(general['representative'])}",
        f"- Licence of the model: {_plain(general['licence'])}",
        f"- Owner's key: `{general['owner_key']}`",
        f"- Model and version: {_plain(general['model'])}, {general['version']}",
        f"- Intended use: {_plain(general['intended_use'])}",
        f"- Built on: {_plain(general['built_on'])}",
        f"- Modality: {general['modality']}; overall size: {size}",
        f"- Languages: {_plain(general['languages'])}",
        f"- Latest collection of data: {_plain(general['latest_collection'])}",
        "",
        "## 2. List of data sources",
        "",
    ]
    for kind, title in KINDS:
        sources = [source for source in facts.manifest.data.sources if source.kind == kind]
        lines += [f"### {title}", "", *(_source(source) for source in sources)]
        lines += [] if sources else ["None."]
        lines.append("")
    lines += [_read(report["coverage"]), ""]
    withdrawn = processing["withdrawn_documents"]
    lines += [
        "## 3. Relevant data processing aspects",
        "",
        f"- Steps: {_plain(processing['steps'])}",
        f"- Held out: {processing['held_out']}",
        f"- Copyright policy: {_plain(processing['copyright_policy'])}",
        f"- Reservations against text and data mining: {_plain(processing['opt_outs'])}",
        f"- Removal of illegal content: {_plain(processing['illegal_content'])}",
        f"- Objections of third persons: {_count_objections(processing['objections'])}",
        *([f"- Privacy: {processing['privacy']}"] if processing["privacy"] else []),
        f"- Withdrawal and opt-out: {processing['withdrawal']} Withdrawn so far: {len(withdrawn)}.",
        *(f"  - `{one['document']}`: {_plain(one['reason']) or 'no reason given'}" for one in withdrawn),
        "",
        "## 4. Compute, energy, contributors",
        "",
        f"- Parameters: {compute['parameters']:,}",
        *_mixture(report["experts"], compute),
        *_cost(facts, compute),
        *(f"- Assumed: {text}" for text in compute["assumptions"]),
        "",
        *_contributors(report["contributors"]),
    ]
    return "\n".join(lines) + "\n"


def _count_objections(counts: dict[str, int] | None) -> str:
    if counts is None:
        return "not known; a report of a live run counts them"
    return (
        f"{counts['objections']:,} in force, to {counted(counts['documents'], 'document')}, of which "
        f"{counts['withdrawn']:,} withdrawn (keys cost nothing, so a person may have signed many)"
    )


def _mixture(experts: dict[str, Any] | None, compute: dict[str, Any]) -> list[str]:
    if experts is None:
        return []
    lines = [
        f"- Experts: {experts['count']} in each layer, of which a token uses {experts['active']}, "
        f"so its path has {compute['active_parameters']:,} parameters"
    ]
    if experts["groups"] > 1:
        lines.append(f"- Each peer trains one of {experts['groups']} groups of them")
    for one in experts["trained"]:
        last_in = "since when is not known" if one["round"] is None else f"last in round {one['round']:,}"
        if one["stale_rounds"]:
            last_in += f", {one['stale_rounds']:,} before the newest"
        holders = counted(one["holders"], "peer") if one["holders"] else "no peer"
        first, last = one["first"], one["last"]
        which = f"expert {first}" if first == last else f"experts {first} to {last}"
        lines.append(f"  - stage {one['stage']}, {which}: trained by {holders}, {last_in}")
    return lines


def _cost(facts: RunFacts, compute: dict[str, Any]) -> list[str]:
    if compute["settled_rounds"] is None:
        return [f"- {what}: not known" for what in ("Tokens", "Operations", "Energy")]
    most = "" if facts.is_counted else "at most "
    return [
        f"- Tokens: {most}{compute['tokens']:,} in {compute['settled_rounds']:,} settled rounds "
        "of the first stage",
        f"- Operations: {compute['floating_point_operations']:.3g}",
        f"- Energy: about {compute['energy_kilowatt_hours']:.3g} kWh",
    ]


def _read(coverage: dict[str, Any]) -> str:
    each = ", ".join(
        f"{peer['epochs']:g} times ({peer['shards_read']:,} shards, of {peer['shards']:,})"
        for peer in coverage["peers"][:MAX_PEERS]
    )
    return f"Read: {coverage['how']}." + (f" By their own records peers have read it {each}." if each else "")


def _source(source: TextSource) -> str:
    size = f"{source.bytes:,} bytes" if source.bytes else NOT_STATED
    facts = [
        f"origin: {source.origin or NOT_STATED}",
        f"licence: {source.licence}",
        f"size: {size}",
        f"collected: {source.collected or NOT_STATED}",
        f"languages: {source.languages or NOT_STATED}",
    ]
    if source.documents:
        facts.append(f"documents: {source.documents:,}")
    if source.processing:
        facts.append(f"processing: {source.processing}")
    if source.sha256:
        facts.append(f"SHA-256: {source.sha256}")
    return f"- **{_plain(source.name)}** (text) - " + _plain("; ".join(facts))


def _contributors(contributors: list[dict[str, Any]]) -> list[str]:
    if not contributors:
        return ["No contributors are known."]
    rows = [
        f"| `{one['peer']}` | {_plain(one['name']).replace('|', ' ')} | {one['tokens']:,} | {_signed(one)} |"
        for one in contributors
    ]
    return ["| peer | name | tokens, by its own report | checkpoints signed |", "|---|---|---|---|", *rows]


def _signed(contributor: dict[str, Any]) -> str:
    return "not known" if contributor["signed"] is None else str(contributor["signed"])


def _plain(text: str) -> str:
    """Return the text without characters that steer a terminal or start HTML, because strangers chose it."""
    kept = "".join(char if char.isprintable() else " " for char in text)
    return kept.replace("<", "&lt;").replace("`", "'")
