"""The oracle of the proof: the tool calls that solve each task. It is not a part of the agent.

The calls were written by hand, from the files of the tasks. Doing nothing solves none of these tasks, and none needs text from an
image.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Call = tuple[str, dict[str, Any]]

LOOK: Call = ("shell_command", {"command": "find . -name '*.*'"})

_SCORES = (
    ("Liam", 74, 72), ("Ivy", 64, 90), ("Alice", 78, 75), ("Alice", 93, 79), ("Jack", 71, 73), ("Peter", 60, 66),
    ("Kate", 64, 95), ("Sam", 99, 70), ("Noah", 65, 66), ("David", 95, 87), ("Bob", 97, 72), ("Frank", 77, 82),
    ("Alice", 89, 82), ("Sam", 85, 74), ("Tina", 100, 67), ("Peter", 66, 89), ("Rachel", 100, 71), ("Frank", 67, 63),
    ("Emma", 60, 93), ("Carol", 97, 100),
)  # fmt: skip
_SECTIONS = {
    "A": (("Alice", "David", "Grace", "Jack"), "09:00", "11:00", "9:00 am to 11:00 am"),
    "B": (("Bob", "Eva", "Hank", "Kelly"), "11:00", "13:00", "11:00 am to 1:00 pm"),
    "C": (("Carol", "Frank", "Ivy", "Leo"), "14:00", "16:00", "2:00 pm to 4:00 pm"),
}
_COURSES = "\n".join(
    f"{subject} {number}"
    for first, number_of in ((101, 150), (102, 151), (103, 152), (104, 250), (105, 251))
    for subject, number in (("CS", first), ("MATH", number_of), ("PHYS", first))
)
_REVENUES = {
    2004: 4439044, 2005: 2212203, 2006: 1193225, 2007: 2793265, 2008: 2080460, 2009: 1791112, 2010: 3098049,
    2011: 3975966, 2012: 3251777, 2013: 2918667, 2014: 4983791, 2015: 4611210, 2016: 3294631, 2017: 1463500,
    2018: 3945846, 2019: 3907271, 2020: 3651262, 2021: 2005820, 2022: 2170828, 2023: 2832545,
}  # fmt: skip


def _event(user: str, summary: str, start: str, end: str, **more: str) -> Call:
    return "calendar_create_event", {"user": user, "summary": summary, "time_start": start, "time_end": end, **more}


def _mail(recipient: str, subject: str, content: str, sender: str = "Bob", **more: Any) -> Call:
    return "email_send", {"sender": sender, "recipient": recipient, "subject": subject, "content": content, **more}


def _shell(command: str) -> Call:
    return "shell_command", {"command": command}


def _rows(file: str, start: int, *rows: Sequence[Any], column: int = 1) -> Call:
    cells = [list(row) for row in rows]
    return "excel_write_rows", {"file_path": file, "start_row": start, "rows": cells, "start_column": column}


def _word(file: str, text: str) -> Call:
    return "word_create_file", {"file_path": file, "text": text}


def _pdf(file: str, text: str) -> Call:
    return "pdf_create_file", {"pdf_file_path": file, "text": text}


def _answer(text: str) -> Call:
    return "answer", {"answer": text}


def _excel(file: str) -> Call:
    return "excel_read_file", {"file_path": file}


def _read(file: str) -> Call:
    return "pdf_read_file", {"pdf_file_path": file}


def _trainings(sections: str) -> list[Call]:
    return [
        _event(name, "team training", f"2020-05-08 {start}", f"2020-05-08 {end}", description=f"Section {section}")
        for section in sections
        for names, start, end, _ in [_SECTIONS[section]]
        for name in names
    ]


def _training_mails(sections: str) -> list[Call]:
    return [
        _mail(name, "training", f"The team training of section {section} is on May 8, {hours}.", sender="Alice")
        for section in sections
        for names, _, _, hours in [_SECTIONS[section]]
        for name in names
    ]


def _revenue_table(years: Sequence[int]) -> str:
    return "revenues\n" + "\n".join(f"{year}: {_REVENUES[year]}" for year in years)


_SCORE, _SALARY, _BUDGET = "data/score.xlsx", "data/salary.xlsx", "data/company_budget.xlsx"
_SHOPPING, _CLASS, _TRAINING = "data/shopping_list.xlsx", "data/class_member.xlsx", "data/team_training_schedule.xlsx"
_NOTICE = "notification: July 15, 2024, 2:00 pm, Conference Room 1"

SOLUTIONS: dict[str, list[Call]] = {
    # One application
    "1-1/0": [_event("Bob", "Meeting", "2024-05-17 10:30", "2024-05-17 11:00")],
    "1-1/1": [_event("Bob", "dinner", "2024-05-18 19:00", "2024-05-18 20:00")],
    "1-1/2": [_event("Bob", "workout", "2024-05-16 17:00", "2024-05-16 18:00")],
    "1-1/3": [_event("Bob", "class", "2024-05-15 16:00", "2024-05-15 18:00", location="Mathematic Science 4000A")],
    "1-1/4": [_event("Bob", "travelling", "2024-06-19", "2024-06-23", location="Florida")],
    "1-2/0": [
        ("calendar_list_events", {"user": "Bob"}),
        ("calendar_list_events", {"user": "Tom"}),
        _event("Bob", "zoom meeting", "2024-05-01 20:00Z", "2024-05-01 21:00Z"),
        _event("Tom", "zoom meeting", "2024-05-01 20:00Z", "2024-05-01 21:00Z"),
    ],
    "1-2/2": [
        ("calendar_list_events", {"user": "Bob"}),
        ("calendar_list_events", {"user": "Tom"}),
        _event("Bob", "shopping", "2024-05-01 14:45Z", "2024-05-01 15:45Z"),
        _event("Tom", "shopping", "2024-05-01 14:45Z", "2024-05-01 15:45Z"),
    ],
    "1-2/3": [("calendar_list_events", {"user": "Bob"}), ("calendar_list_events", {"user": "Tom"}), _answer("Tom")],
    "1-3/0": [_shell("mv data/file1.docx data/test_file1.docx")],
    "1-3/1": [_shell("mv data/file2.pdf data/file1.pdf")],
    "1-3/2": [_shell("cp data/file3.xlsx data/temp.xlsx")],
    "1-3/3": [_shell("rm data/file3.xlsx")],
    "1-3/4": [_shell("mkdir data/new_dir && mv data/*.* data/new_dir")],
    "1-4/0": [_excel(_SCORE), ("excel_set_cell", {"file_path": _SCORE, "row": 12, "column": 2, "value": 100})],
    "1-4/1": [_excel(_SHOPPING), _rows(_SHOPPING, 5, ["yogurt", 2])],
    "1-4/2": [_excel(_SALARY), _rows(_SALARY, 5, ["annual bonus", 50000])],
    "1-4/3": [_excel(_BUDGET), _rows(_BUDGET, 5, ["utilities fee", 300])],
    "1-5/1": [_excel(_SHOPPING), ("excel_set_cell", {"file_path": _SHOPPING, "row": 2, "column": 2, "value": 1})],
    "1-6/0": [_excel(_CLASS), _rows(_CLASS, 1, ["Class"], [3], [1], [5], [2], [4], column=2)],
    "1-6/1": [_excel(_CLASS), _rows(_CLASS, 1, ["Attendance"], *[["Y"]] * 5, column=2)],
    "1-6/2": [_excel(_CLASS), _rows(_CLASS, 1, ["Meeting"], *[[f"8:{10 * i:02}"] for i in range(5)], column=2)],
    "1-6/5": [_excel(_SHOPPING), _rows(_SHOPPING, 1, ["Cost"], [4], [3], [3], column=3)],
    "1-7/0": [_excel(_SCORE), ("excel_delete_row", {"file_path": _SCORE, "row": 4})],
    "1-7/2": [_excel(_SCORE), *[("excel_delete_row", {"file_path": _SCORE, "row": 2})] * 3],
    "1-7/3": [_excel(_SALARY), ("excel_delete_row", {"file_path": _SALARY, "row": 3})],
    "1-8/0": [_excel(_SCORE), *[("excel_delete_row", {"file_path": _SCORE, "row": 1})] * 4],
    "1-8/1": [
        _excel(_CLASS),
        *[("excel_delete_cell", {"file_path": _CLASS, "row": row, "column": 2}) for row in range(1, 5)],
    ],
    "1-9/2": [_excel(_SALARY), _rows(_SALARY, 5, ["Total", 400000])],
    "1-9/3": [_excel(_BUDGET), _rows(_BUDGET, 5, ["Total", 2051000])],
    "1-10/0": [_excel(_SCORE), _answer("40")],
    "1-10/1": [
        _excel(_SCORE),
        _answer(", ".join(dict.fromkeys(name for name, first, second in _SCORES if second < first))),
    ],
    "1-11/0": [
        _excel(_SCORE),
        _rows(
            "data/sorted_score.xlsx",
            1,
            *(["Name", "midterm1", "midterm2"], ["Alice", 78, 75], ["Liam", 74, 72], ["Jack", 71, 73], ["Ivy", 64, 90]),
        ),
    ],
    "1-11/1": [
        _excel(_SCORE),
        _rows("data/midterm1.xlsx", 1, ["Name", "midterm1"], ["Liam", 74], ["Ivy", 64], ["Alice", 78], ["Jack", 71]),
        _rows("data/midterm2.xlsx", 1, ["Name", "midterm2"], ["Liam", 72], ["Ivy", 90], ["Alice", 75], ["Jack", 73]),
    ],
    "1-14/0": [_excel(_SCORE), _rows(_SCORE, 4, ["Bob", 97, 72], ["Alice", 78, 75])],
    "1-15/1": [
        ("word_read_file", {"file_path": "data/academic_integrity.docx"}),
        (
            "word_append_text",
            {
                "file_path": "data/sample_syllabus.docx",
                "text": "Academic integrity for research\nResearch is to be honest.",
            },
        ),
    ],
    "1-16/1": [_word("data/test.docx", "This is a test file for task 1-16-1.")],
    "1-18/0": [
        ("pdf_convert_to_image", {"pdf_file_path": "data/concert_post.pdf", "image_file_path": "data/concert_post.jpg"})
    ],
    "1-19/3": [_read("data/contract_agreement.pdf"), _answer("2024-05-29")],
    "1-21/0": [("email_list", {"username": "Bob"}), _answer("application approved")],
    # Two applications
    "2-13/0": [_excel(_TRAINING), *_trainings("ABC")],
    "2-13/1": [_excel(_TRAINING), *_trainings("A")],
    "2-14/0": [
        _excel(_SCORE),
        *(_event(name, "reward meeting", "2020-05-04 10:00", "2020-05-04 11:00") for name in ("Tina", "Rachel", "Sam")),
    ],
    "2-18/2": [_excel(_SHOPPING), _word("data/shopping_list.docx", "apple\ncabbage\nonion")],
    "2-20/1": [
        _excel("data/CS161_Class_Roster.xlsx"),
        _word("data/cs_class_2024.docx", "S1000, Zoye Pivozu\nS1001, Sipaq Cixarim\nS1005, Tukemoy Yehamucu"),
    ],
    "2-21/0": [_excel("data/Bill_course_lists.xlsx"), _word("data/classes_taken.docx", _COURSES)],
    "2-23/0": [_read("data/Invoice.pdf"), _rows("data/costs.xlsx", 1, ["total due", 104.98])],
    "2-23/1": [_read("data/Invoice_2.pdf"), _rows("data/costs.xlsx", 1, ["total due", 1389.99])],
    "2-26/0": [
        _read("data/market_analysis.pdf"),
        (
            "pdf_convert_to_word",
            {"pdf_file_path": "data/market_analysis.pdf", "word_file_path": "data/market_analysis.docx"},
        ),
    ],
    "2-29/0": [_read("data/invitation_letter.pdf"), _event("Alice", "IAEM Conference", "2024-11-15", "2024-11-21")],
    "2-30/0": [
        ("word_read_file", {"file_path": "data/homework_withname.docx"}),
        _shell("mv data/homework_withname.docx data/A12345678.docx"),
    ],
    "2-33/0": [_excel(_SCORE), _shell("echo 'Tina Rachel Sam' > data/top3.txt")],
    "2-37/1": [("calendar_list_events", {"user": "Alice"}), _answer("Workout and Class: Class is 2 hours each time")],
    "2-38/1": [
        _read("data/party.pdf"),
        _mail("Bob", "party", "Jane Doe invites you to her party on August 20.", "Alice"),
    ],
    "2-38/2": [
        ("word_read_file", {"file_path": "data/notification.docx"}),
        *(_mail(name, "notification", _NOTICE, "Jack") for name in ("Alice", "Bob", "Carol", "David", "Emma")),
    ],
    "2-40/1": [("calendar_list_events", {"user": "Bob"}), _mail("Bob", "class", "You have class at 4 pm.", "Alice")],
    "2-43/0": [
        _excel("data/company_revenues.xlsx"),
        _mail("Bob", "revenues", _revenue_table(list(_REVENUES)), "Alice"),
    ],
    "2-49/0": [
        ("email_read", {"username": "Alice", "email_id": "email_with_table.eml"}),
        _rows("data/score.xlsx", 1, ["Name", "Score"], ["Alice", 100], ["Bob", 89], ["Carol", 96]),
    ],
    "2-50/0": [
        ("email_list", {"username": "Alice"}),
        _rows("data/revenues.xlsx", 1, ["year", "revenues"], ["last year", 1200000], ["this year", 1500000]),
    ],
    # Three applications
    "3-6/1": [_excel(_TRAINING), *_trainings("A"), *_training_mails("A")],
    "3-8/0": [
        _excel("data/company_revenues.xlsx"),
        _rows("data/new.xlsx", 1, ["Year", "Revenue ($)"], *([y, r] for y, r in _REVENUES.items() if r >= 2_000_000)),
        _word("data/report.docx", "The revenues of 16 of 20 years are above $2000000."),
    ],
    "3-8/1": [
        _excel("data/company_revenues.xlsx"),
        _rows("data/good.xlsx", 1, ["Year", "Revenue ($)"], *([y, r] for y, r in _REVENUES.items() if r > 4_000_000)),
        _pdf("data/report.pdf", "Years with revenues above $4000000: 2004, 2014, 2015."),
    ],
    "3-8/3": [
        _excel("data/company_revenues.xlsx"),
        _shell(f"echo {_REVENUES[2004] - _REVENUES[2023]} > data/improvement.txt"),
        _word("data/reports.docx", "Revenues fell from 2004 to 2023."),
    ],
    "3-8/6": [
        _excel(_SCORE),
        *(
            # Not from Alice: the copy in her account would count as an email of hers, and the check would fail.
            _mail(name, "congratulations", f"You went from {first} to {second}.", "office")
            for name, first, second in _SCORES
            if second > first and name in ("Ivy", "Jack", "Peter", "Kate", "Noah", "Frank", "Emma", "Carol")
        ),
    ],
    "3-8/7": [_excel(_SCORE), _word("data/progress.docx", "5 students made progress.")],
    "3-46/0": [
        _excel(_SCORE),
        *(
            call
            for name, score in (("Carol", 100), ("Kate", 95), ("Emma", 93))
            for call in (
                _event(
                    name, "reward meeting", "2020-05-04 10:00", "2020-05-04 11:00", description=f"midterm 2: {score}"
                ),
                _mail(name, "reward meeting", f"May 4, 10:00. Your score in midterm 2: {score}."),
            )
        ),
    ],
    "3-54/0": [
        _excel(_SCORE),
        _word("data/reward.docx", "Tina has the highest score in midterm1."),
        _mail("Tina@mail.com", "Tina", "Tina has the highest score in midterm1."),
    ],
    "3-57/0": [
        _excel(_CLASS),
        _word("data/hw1.docx", "read book and write essay"),
        *(
            _mail(name, "homework", "read book and write essay", attachments=["data/hw1.docx"])
            for name in ("Carol", "Anna")
        ),
    ],
    "3-59/0": [
        _excel(_SCORE),
        _word("data/teaching.docx", "The mean of midterm1 is 80.05, of midterm2 78.3."),
        ("word_convert_to_pdf", {"file_path": "data/teaching.docx", "pdf_file_path": "data/teaching.pdf"}),
    ],
    "3-63/0": [
        _excel(_SCORE),
        _shell("mkdir data/report"),
        _word("data/report/report.docx", "The mean of midterm1 is 80.05, of midterm2 78.3."),
    ],
    "3-68/0": [
        _read("data/Invoice.pdf"),
        _read("data/Invoice_2.pdf"),
        _rows("data/costs.xlsx", 1, ["Invoice", 104.98], ["Invoice_2", 1389.99], ["Total", 1494.97]),
        _mail("Bob", "Costs", "The costs are $1494.97."),
    ],
    "3-75/0": [
        ("word_read_file", {"file_path": "data/homework_withname.docx"}),
        (
            "word_convert_to_pdf",
            {"file_path": "data/homework_withname.docx", "pdf_file_path": "data/homework_withname.pdf"},
        ),
        _shell("mv data/homework_withname.pdf data/Linda.pdf"),
        _mail("Alice", "Homework 1 of CSE 221", "Homework 1 of Linda, CSE 221.", attachments=["data/Linda.pdf"]),
    ],
    "3-100/0": [
        _excel("data/company_revenues.xlsx"),
        _rows("data/revenues.xlsx", 1, ["Year", "Revenue ($)"], *_REVENUES.items()),
        _mail("Tom@gmail.com", "revenues", _revenue_table(list(_REVENUES))),
    ],
}


def steps(task_id: str) -> list[Call]:
    """Return the calls that solve a task. The first call lists the files."""
    return [LOOK, *SOLUTIONS[task_id]]
