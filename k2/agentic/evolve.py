"""Evolved tools: category -> application -> tool, each with interface, description and operational semantics (report section
3.1.1).

Semantics are declarative, so that one simulator executes them all: a verb (create, read, update, delete, list, toggle) over
entities with typed fields. Evolution goes in generations. In the first, every application has its plain tools; in each later
one the entity is specialised by one more qualifier. Tools of an application come together, so that an agent can be given a
useful set.
"""

import random
from collections.abc import Iterator
from typing import Any

from k2.errors import ConfigError

Tool = dict[str, Any]
INTEGER = {"type": "integer", "minimum": 0, "maximum": 9}
PLACES = ["hall", "desk", "loft", "gate", "barn", "shop"]
PEOPLE = ["Ann", "Ben", "Eva", "Max", "Tom", "Zoe"]
CODES = ["A1", "A2", "B1", "B2", "C1", "C2"]
WORDS = ["sun", "moon", "star", "wind", "rain", "snow"]
OFF_ON = ["off", "on"]

# category (the 17 of figure 9b): application: entity, names of its instances, its fields (integers from 0 to 9, or a choice of
# words)
CATALOGUE: dict[str, dict[str, tuple[str, list[str], dict[str, Any]]]] = {
    "enterprise_business_intelligence": {
        "reports": ("report", WORDS, {"pages": int, "state": ["draft", "final"]}),
        "budgets": ("budget", CODES, {"units": int, "state": ["open", "closed"]}),
        "teams": ("team", WORDS, {"size": int, "rank": ["low", "mid", "high"]}),
    },
    "transportation_logistics": {
        "trucks": ("truck", CODES, {"load": int, "state": ["free", "busy"]}),
        "parcels": ("parcel", CODES, {"weight": int, "place": ["depot", "road", "home"]}),
        "buses": ("bus", CODES, {"seats": int, "line": ["north", "south"]}),
    },
    "iphone_android": {
        "alarms": ("alarm", WORDS, {"hour": int, "power": OFF_ON}),
        "contacts": ("contact", PEOPLE, {"number": int, "group": ["work", "home"]}),
        "timers": ("timer", WORDS, {"minutes": int, "power": OFF_ON}),
    },
    "smart_home": {
        "lights": ("lamp", PLACES, {"level": int, "power": OFF_ON}),
        "heating": ("heater", PLACES, {"heat": int, "mode": ["eco", "day", "night"]}),
        "locks": ("lock", PLACES, {"code": int, "state": ["open", "shut"]}),
    },
    "real_estate_property": {
        "houses": ("house", CODES, {"rooms": int, "state": ["free", "sold"]}),
        "tenants": ("tenant", PEOPLE, {"floor": int, "rent": ["due", "paid"]}),
        "visits": ("visit", CODES, {"hour": int, "state": ["open", "done"]}),
    },
    "unknown": {
        "counters": ("counter", WORDS, {"value": int, "color": ["red", "blue", "green"]}),
        "boxes": ("box", CODES, {"items": int, "state": ["open", "shut"]}),
        "cards": ("card", WORDS, {"points": int, "side": ["front", "back"]}),
    },
    "software_apps": {
        "tasks": ("task", WORDS, {"rank": int, "state": ["open", "done"]}),
        "files": ("file", WORDS, {"size": int, "access": ["read", "write"]}),
        "bugs": ("bug", CODES, {"level": int, "state": ["open", "fixed"]}),
    },
    "legal_compliance": {
        "contracts": ("contract", CODES, {"years": int, "state": ["draft", "signed"]}),
        "cases": ("case", CODES, {"files": int, "state": ["open", "closed"]}),
        "audits": ("audit", WORDS, {"score": int, "result": ["pass", "fail"]}),
    },
    "education_elearning": {
        "courses": ("course", WORDS, {"hours": int, "level": ["easy", "hard"]}),
        "students": ("student", PEOPLE, {"grade": int, "state": ["active", "away"]}),
        "quizzes": ("quiz", WORDS, {"points": int, "state": ["open", "closed"]}),
    },
    "robot_control": {
        "arms": ("arm", CODES, {"angle": int, "grip": ["open", "shut"]}),
        "drones": ("drone", CODES, {"height": int, "state": ["land", "fly"]}),
        "wheels": ("wheel", CODES, {"speed": int, "brake": OFF_ON}),
    },
    "agriculture_environmental": {
        "fields": ("field", PLACES, {"water": int, "crop": ["corn", "rice", "oats"]}),
        "pumps": ("pump", PLACES, {"flow": int, "power": OFF_ON}),
        "sensors": ("sensor", CODES, {"value": int, "power": OFF_ON}),
    },
    "healthcare_medical": {
        "patients": ("patient", PEOPLE, {"room": int, "state": ["well", "ill"]}),
        "doses": ("dose", PEOPLE, {"pills": int, "time": ["day", "night"]}),
        "beds": ("bed", CODES, {"floor": int, "state": ["free", "used"]}),
    },
    "manufacturing_industrial_iot": {
        "machines": ("machine", CODES, {"speed": int, "power": OFF_ON}),
        "valves": ("valve", CODES, {"flow": int, "state": ["open", "shut"]}),
        "orders": ("order", CODES, {"count": int, "state": ["new", "done"]}),
    },
    "desktop_systems": {
        "windows": ("window", WORDS, {"size": int, "state": ["open", "shut"]}),
        "printers": ("printer", PLACES, {"copies": int, "power": OFF_ON}),
        "users": ("user", PEOPLE, {"quota": int, "role": ["guest", "admin"]}),
    },
    "financial_trading": {
        "stocks": ("stock", CODES, {"price": int, "trend": ["up", "down"]}),
        "accounts": ("account", PEOPLE, {"funds": int, "state": ["open", "closed"]}),
        "bids": ("bid", CODES, {"amount": int, "side": ["buy", "sell"]}),
    },
    "website_control": {
        "pages": ("page", WORDS, {"visits": int, "state": ["draft", "live"]}),
        "posts": ("post", WORDS, {"likes": int, "state": ["hidden", "shown"]}),
        "banners": ("banner", WORDS, {"width": int, "power": OFF_ON}),
    },
    "gaming_entertainment": {
        "players": ("player", PEOPLE, {"score": int, "team": ["red", "blue"]}),
        "songs": ("song", WORDS, {"stars": int, "mood": ["calm", "fast"]}),
        "levels": ("stage", CODES, {"coins": int, "state": ["locked", "open"]}),
    },
}
QUALIFIERS = (
    "main old new small big red blue green spare guest team home test night day north south east west inner outer upper lower "
    "first last local remote fast slow cheap rare cold warm dry wet open late early shared private"
).split()


def evolve(count: int, seed: int) -> list[Tool]:
    """`count` tools with names of their own, spread evenly over the categories. ConfigError if evolution does not reach that
    far.
    """
    tools: list[Tool] = []
    names: set[str] = set()
    for tool in generations(random.Random(f"tools {seed}")):
        if len(tools) == count:
            return tools
        if tool["name"] not in names:
            names.add(tool["name"])
            tools.append(tool)
    if len(tools) == count:
        return tools
    raise ConfigError(
        f"params.yaml: tools.evolved_tools: {count} is more than the {len(tools)} that evolution reaches; ask for fewer"
    )


def generations(rng: random.Random) -> Iterator[Tool]:
    """Generation 0: the plain entities; each later one: every entity under one more qualifier. Categories take turns, tool by
    tool set.
    """
    for qualifier in ["", *rng.sample(QUALIFIERS, len(QUALIFIERS))]:
        waiting = []  # one queue of tool sets a category
        for category, applications in CATALOGUE.items():
            sets = [
                part
                for application in rng.sample(sorted(applications), len(applications))
                for part in tool_sets(category, application, qualifier, rng)
            ]
            first = [sets[i] for i in range(0, len(sets), SETS)]  # an application's first set before anyone's second
            waiting.append(first + [part for i, part in enumerate(sets) if i % SETS])
        rng.shuffle(waiting)
        while any(waiting):
            for queue in waiting:
                if queue:
                    yield from queue.pop(0)


SETS = 4  # of an application's tools


def tool_sets(category: str, application: str, qualifier: str, rng: random.Random) -> list[list[Tool]]:
    """All tools of an application in SETS sets, each of tools that go together."""
    entity, keys, fields = CATALOGUE[category][application]
    entity = f"{qualifier}_{entity}" if qualifier else entity
    number, choice = list(fields)
    order = [number, choice] if rng.random() < 0.5 else [choice, number]

    def make(verb: str, *uses: str) -> Tool:
        return specification(category, application, entity, keys, fields, verb, list(uses))

    switch = [make("toggle", choice)] if len(fields[choice]) == 2 else []
    sets = [
        [make("read", order[0]), make("update", order[0])],
        [make("read", order[1]), make("update", order[1]), *switch],
        [make("create"), make("delete"), make("list")],
        [make("create", order[0]), make("create", order[1]), make("create", *order), make("update", *order)],
    ]
    rng.shuffle(sets)
    return sets


def specification(
    category: str, application: str, entity: str, keys: list[str], fields: dict[str, Any], verb: str, uses: list[str]
) -> Tool:
    """A tool in MCP format with the semantics that the simulator executes. `uses`: the fields that the verb reads or writes."""
    types = {name: dict(INTEGER) if kind is int else {"type": "string", "enum": kind} for name, kind in fields.items()}
    shown, what = entity.replace("_", " "), " and ".join(uses)
    a = "an" if shown[0] in "aeiou" else "a"
    name, description = {
        "create": ("_".join([f"new_{entity}", *uses]), f"Add {a} {shown}{f' with {what}' if uses else ''}."),
        "read": (f"get_{entity}_{'_'.join(uses)}", f"Read {what} of {a} {shown}."),
        "update": (f"set_{entity}_{'_'.join(uses)}", f"Set {what} of {a} {shown}."),
        "delete": (f"drop_{entity}", f"Remove {a} {shown}."),
        "list": (f"list_{entity}", f"Names of every {shown}."),
        "toggle": (f"flip_{entity}_{'_'.join(uses)}", f"Flip {what} of {a} {shown}."),
    }[verb]
    noun = entity.split("_")[-1]
    properties: dict[str, Any] = {} if verb == "list" else {noun: {"type": "string"}}
    if verb in ("create", "update"):
        properties |= {field: {"type": types[field]["type"]} for field in uses}
    return {
        "name": name,
        "description": description,
        "inputSchema": {"type": "object", "properties": properties, "required": list(properties)},
        "category": category,
        "application": application,
        "origin": "evolved",
        "semantics": {"verb": verb, "entity": entity, "key": noun, "keys": keys, "fields": types, "uses": uses},
    }
