"""Emails: a folder for each account, `emails/NAME/`, a file for each email."""

from __future__ import annotations

import re
from email.message import EmailMessage

from .. import documents
from ..errors import OfficeError
from ..workspace import Workspace


class EmailApp:
    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace

    def send(
        self,
        sender: str,
        recipient: str,
        subject: str,
        content: str,
        file_name: str = "",
        attachments: list[str] | None = None,
    ) -> str:
        """Send an email to one person. A copy is kept in the sender's account.

        Args:
            sender: Name or address of the sender
            recipient: Name or address of the one recipient
            subject: The subject
            content: The text
            file_name: What the email is called in the accounts, like notes.eml; default: the subject
            attachments: Files of the workspace to attach, like data/report.pdf
        """
        names = [_account(sender), _account(recipient)]
        message = EmailMessage()
        message["From"], message["To"] = (f"{name.replace(' ', '.')}@example.com" for name in names)
        message["Subject"] = " ".join(subject.split())
        message.set_content(content)
        for name in attachments or []:
            data = self._workspace.read(name)
            file = name.rsplit("/", 1)[-1]
            message.add_attachment(data, maintype="application", subtype="octet-stream", filename=file)
        title = (
            re.sub(r"[^\w .,()-]", "_", (file_name or subject).strip().removesuffix(".eml"))[:80].strip(" .") or "email"
        )
        for name in dict.fromkeys(names):
            self._workspace.write(f"emails/{name}/{title}.eml", bytes(message))
        return f"Sent {title}.eml to {names[1]}."

    def list_emails(self, username: str) -> str:
        """List the emails in a user's account: id, sender, recipient, subject and how each begins.

        Args:
            username: Name of the user
        """
        emails = documents.read_emails(self._workspace, username)
        lines = [
            f"{mail.name}: from {mail.sender} to {mail.recipient}, subject {mail.subject!r}: "
            + " ".join(mail.content.split())[:60]
            for mail in emails
        ]
        return "\n".join(lines) or f"{username} has no emails."

    def read(self, username: str, email_id: str) -> str:
        """Read one email whole.

        Args:
            username: Name of the user whose account it is in
            email_id: Its id, like meeting.eml
        """
        for mail in documents.read_emails(self._workspace, username):
            if mail.name in (email_id, f"{email_id}.eml"):
                return str(mail)
        raise OfficeError(f"{username} has no email {email_id!r}; list_emails shows the ids")


def _account(person: str) -> str:
    name = person.strip().partition("@")[0]
    if not re.fullmatch(r"[\w .-]{1,60}", name) or name.startswith("."):
        raise OfficeError(f"{person!r} is not one person's name or address")
    return name
