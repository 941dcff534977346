"""Calendars: one iCalendar file for each user, `calendar/NAME.ics`."""

from __future__ import annotations

import re
import uuid
from datetime import UTC, datetime

import icalendar

from .. import documents
from ..errors import OfficeError
from ..workspace import Workspace

_FORMATS = ("%Y-%m-%d %H:%M:%S", "%Y-%m-%d %H:%M", "%Y-%m-%dT%H:%M:%S", "%Y-%m-%dT%H:%M", "%Y-%m-%d")


class CalendarApp:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def create_event(
        self, user: str, summary: str, time_start: str, time_end: str, location: str = "", description: str = ""
    ) -> str:
        """Add an event to a user's calendar.

        Args:
            user: Name of the user, like Bob; the calendar is calendar/Bob.ics
            summary: What the event is
            time_start: When it begins, like 2024-05-17 10:30; with a Z at the end for UTC
            time_end: When it ends, in the same form
            location: Where it is
            description: Details
        """
        start, end = _moment(time_start), _moment(time_end)
        if (start.tzinfo is None) != (end.tzinfo is None):
            raise OfficeError("either both times end with Z or neither does")
        if end < start:
            raise OfficeError("the event ends before it begins")
        calendar = self._load(user) if self._exists(user) else _empty_calendar()
        event = icalendar.Event()
        event.add("uid", str(uuid.uuid4()))
        event.add("dtstamp", datetime.now(UTC))
        event.add("dtstart", start)
        event.add("dtend", end)
        for name, value in (("summary", summary), ("location", location), ("description", description)):
            if value:
                event.add(name, value)
        calendar.add_component(event)
        self._save(user, calendar)
        return f"Added {summary!r} to the calendar of {user}."

    def list_events(self, user: str) -> str:
        """List the events of a user's calendar, earliest first.

        Args:
            user: Name of the user
        """
        events = documents.read_events(self._workspace.file(_file(user)))
        lines = [
            f"{event.start:%Y-%m-%d %H:%M} to {event.end:%Y-%m-%d %H:%M}: {event.summary}"
            + (f" ({event.location})" if event.location else "")
            for event in events
        ]
        return "\n".join(lines) or f"The calendar of {user} is empty."

    def delete_event(self, user: str, summary: str) -> str:
        """Remove all events with this summary from a user's calendar.

        Args:
            user: Name of the user
            summary: The summary of the events
        """
        calendar = self._load(user)
        kept = [part for part in calendar.subcomponents if str(part.get("SUMMARY", "")) != summary]
        removed = len(calendar.subcomponents) - len(kept)
        if not removed:
            raise OfficeError(f"the calendar of {user} has no event {summary!r}")
        calendar.subcomponents = kept
        self._save(user, calendar)
        return f"Removed {removed} event{'s' if removed > 1 else ''}."

    def _exists(self, user: str) -> bool:
        return self._workspace.path(_file(user)).exists()

    def _load(self, user: str) -> icalendar.Calendar:
        return documents.load_calendar(self._workspace.file(_file(user)))

    def _save(self, user: str, calendar: icalendar.Calendar) -> None:
        self._workspace.write(_file(user), calendar.to_ical())


def _empty_calendar() -> icalendar.Calendar:
    calendar = icalendar.Calendar()
    calendar.add("prodid", "-//officebench agent//EN")
    calendar.add("version", "2.0")
    return calendar


def _file(user: str) -> str:
    name = user.strip().removesuffix(".ics")
    if not re.fullmatch(r"[\w .@-]{1,60}", name) or name.startswith("."):
        raise OfficeError(f"{user!r} is not the name of one user")
    return f"calendar/{name}.ics"


def _moment(text: str) -> datetime:
    bare, zone = (text.strip()[:-1].strip(), UTC) if text.strip().endswith("Z") else (text.strip(), None)
    for form in _FORMATS:
        try:
            return datetime.strptime(bare, form).replace(tzinfo=zone)
        except ValueError:
            continue
    raise OfficeError(f"{text!r} is not a time: write it like 2024-05-17 10:30")
