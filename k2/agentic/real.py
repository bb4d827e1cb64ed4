"""Real tools: Python functions served over the Model Context Protocol. Specifications and results come through its client.

Each tool carries sample values and a way to be asked for, from which tasks are made; `{result}` in tasks is what the running
tool returned.
"""

import calendar
import contextlib
import datetime
import statistics
from collections.abc import Callable, Iterator
from typing import Any

from mcp import Client
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

WORDS = ["cat", "dog", "sun", "moon", "tree", "bird", "fish", "door", "milk", "snow", "star", "leaf"]
LISTS = ["3 1 2", "5 9 4", "8 2 6", "7 1 9", "4 4 6", "9 3 5", "2 8 1", "6 5 7"]
DATES = ["2024-01-31", "2024-02-28", "2025-03-01", "2025-06-15", "2025-12-24", "2026-04-30", "2026-10-09"]
SMALL, LARGE = list(range(1, 10)), list(range(10, 100))

Tool = dict[str, Any]
REGISTERED: dict[
    str, tuple[str, str, Callable[..., Any], dict[str, Any]]
] = {}  # name: category, application, function, how it is used


def tool(category: str, application: str, ask: str, **values: list[Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function as a tool: the user's words, with {argument} in them, and sample values of each argument."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REGISTERED[function.__name__] = (category, application, function, {"ask": ask, "values": values})
        return function

    return register


# -- calculator -------------------------------------------------------------------------------------------------------------------
@tool("desktop_systems", "calculator", "add {a} and {b}", a=LARGE, b=SMALL)
def sum_of(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@tool("desktop_systems", "calculator", "take {b} from {a}", a=LARGE, b=SMALL)
def difference(a: int, b: int) -> int:
    """Subtract b from a."""
    return a - b


@tool("desktop_systems", "calculator", "multiply {a} by {b}", a=SMALL, b=SMALL)
def product(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


@tool("desktop_systems", "calculator", "divide {a} by {b}", a=LARGE, b=[0, *SMALL])
def quotient(a: int, b: int) -> int:
    """Divide a by b, rounded down."""
    if b == 0:
        raise ToolError("error: division by zero")
    return a // b


@tool("desktop_systems", "calculator", "find the rest of {a} by {b}", a=LARGE, b=SMALL)
def remainder(a: int, b: int) -> int:
    """Remainder of a divided by b."""
    return a % b


@tool("desktop_systems", "calculator", "square {a}", a=SMALL)
def square(a: int) -> int:
    """Square a number."""
    return a * a


# -- units ------------------------------------------------------------------------------------------------------------------------
@tool("transportation_logistics", "units", "convert {km} km to meters", km=SMALL)
def km_to_m(km: int) -> int:
    """Kilometers to meters."""
    return km * 1000


@tool("healthcare_medical", "units", "convert {c} C to Fahrenheit", c=[0, 5, 10, 15, 20, 25, 30, 35, 40])
def c_to_f(c: int) -> int:
    """Celsius to Fahrenheit."""
    return round(c * 9 / 5 + 32)


@tool("manufacturing_industrial_iot", "units", "convert {h} hours to minutes", h=SMALL)
def h_to_min(h: int) -> int:
    """Hours to minutes."""
    return h * 60


@tool("financial_trading", "units", "find {percent} percent of {amount}", percent=[10, 20, 50], amount=[10, 20, 30, 40, 60, 80])
def percent_of(percent: int, amount: int) -> int:
    """A percentage of an amount."""
    return percent * amount // 100


@tool("agriculture_environmental", "units", "convert {kg} kg to grams", kg=SMALL)
def kg_to_g(kg: int) -> int:
    """Kilograms to grams."""
    return kg * 1000


# -- text -------------------------------------------------------------------------------------------------------------------------
@tool("education_elearning", "text", "count the letters of {text}", text=WORDS)
def length(text: str) -> int:
    """Count the letters of a text."""
    return len(text)


@tool("education_elearning", "text", "reverse {text}", text=WORDS)
def reverse(text: str) -> str:
    """Reverse a text."""
    return text[::-1]


@tool("education_elearning", "text", "write {text} in upper case", text=WORDS)
def upper(text: str) -> str:
    """Text in upper case."""
    return text.upper()


@tool("software_apps", "text", "join {a} and {b}", a=WORDS, b=WORDS)
def concat(a: str, b: str) -> str:
    """Join two texts."""
    return a + b


@tool("software_apps", "text", "get the first letter of {text}", text=WORDS)
def first_letter(text: str) -> str:
    """First letter of a text."""
    return text[0]


# -- lists ------------------------------------------------------------------------------------------------------------------------
@tool("enterprise_business_intelligence", "lists", "find the largest of {numbers}", numbers=LISTS)
def largest(numbers: str) -> int:
    """Largest of numbers."""
    return max(_numbers(numbers))


@tool("enterprise_business_intelligence", "lists", "find the smallest of {numbers}", numbers=LISTS)
def smallest(numbers: str) -> int:
    """Smallest of numbers."""
    return min(_numbers(numbers))


@tool("enterprise_business_intelligence", "lists", "find the sum of {numbers}", numbers=LISTS)
def total(numbers: str) -> int:
    """Sum of numbers."""
    return sum(_numbers(numbers))


@tool("enterprise_business_intelligence", "lists", "find the median of {numbers}", numbers=LISTS)
def median(numbers: str) -> str:
    """Median of numbers."""
    return f"{statistics.median(_numbers(numbers)):g}"


@tool("enterprise_business_intelligence", "lists", "sort {numbers}", numbers=LISTS)
def sort_numbers(numbers: str) -> str:
    """Sort numbers."""
    return " ".join(map(str, sorted(_numbers(numbers))))


# -- calendar ---------------------------------------------------------------------------------------------------------------------
@tool("iphone_android", "calendar", "find the date {days} days after {date}", date=DATES, days=SMALL)
def add_days(date: str, days: int) -> str:
    """Date some days later."""
    return (_date(date) + datetime.timedelta(days=days)).isoformat()


@tool("iphone_android", "calendar", "find the weekday of {date}", date=DATES)
def weekday(date: str) -> str:
    """Weekday of a date."""
    return calendar.day_name[_date(date).weekday()]


@tool("iphone_android", "calendar", "count the days of month {month} in {year}", year=[2023, 2024, 2025], month=list(range(1, 13)))
def month_days(year: int, month: int) -> int:
    """Days of a month."""
    if not 1 <= month <= 12:
        raise ToolError("error: no such month")
    return calendar.monthrange(year, month)[1]


# -- a store that keeps its state -------------------------------------------------------------------------------------------------
NOTES: dict[str, str] = {}


@tool("software_apps", "notes", "save the note {value} under {key}", key=WORDS, value=WORDS)
def put_note(key: str, value: str) -> str:
    """Save a note."""
    NOTES[key] = value
    return "ok"


@tool("software_apps", "notes", "read the note {key}", key=WORDS)
def get_note(key: str) -> str:
    """Read a note."""
    if key not in NOTES:
        raise ToolError(f"error: no note {key}")
    return NOTES[key]


@tool("software_apps", "notes", "remove the note {key}", key=WORDS)
def drop_note(key: str) -> str:
    """Delete a note."""
    if NOTES.pop(key, None) is None:
        raise ToolError(f"error: no note {key}")
    return "ok"


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split()] or [0]
    except ValueError:
        raise ToolError("error: not numbers") from None


def _date(text: str) -> datetime.date:
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        raise ToolError("error: not a date") from None


# -- the server and its client ----------------------------------------------------------------------------------------------------
class RealTools:
    """A client of the running server, for synchronous callers. State starts empty after `reset`."""

    def __init__(self, run: Callable[[str, dict[str, Any]], str], specifications: list[Tool]) -> None:
        self._run, self.specifications = run, specifications

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Text of the result; a tool's own error is text that begins with "error"."""
        return self._run(name, arguments)

    def reset(self) -> None:
        NOTES.clear()


@contextlib.contextmanager
def serve() -> Iterator[RealTools]:
    """Start the server with every tool, connect a client in memory, and list the tools through the protocol."""
    from anyio.from_thread import start_blocking_portal

    server = MCPServer("k2flow", log_level="ERROR")
    for _, _, function, _ in REGISTERED.values():
        server.tool(structured_output=False)(function)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(Client(server)) as client:

        def call(name: str, arguments: dict[str, Any]) -> str:
            result = portal.call(client.call_tool, name, arguments)
            text = "".join(getattr(part, "text", "") for part in result.content)
            return text.removeprefix(f"Error executing tool {name}: ") if result.is_error else text

        listed = portal.call(client.list_tools).tools
        yield RealTools(call, [_record(entry.model_dump(by_alias=True, exclude_none=True)) for entry in listed])


def _record(specification: dict[str, Any]) -> Tool:
    """What the protocol declares of a tool, with its place in the catalogue and how it is asked for."""
    category, application, _, use = REGISTERED[specification["name"]]
    return {
        "name": specification["name"],
        "description": specification["description"],
        "inputSchema": specification["inputSchema"],
        "category": category,
        "application": application,
        "origin": "real",
        "semantics": {"server": "k2flow", **use},
    }
