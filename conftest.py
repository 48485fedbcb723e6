"""What every test run says at its end: how many GPU tests were skipped, and why."""

from collections import Counter


def pytest_terminal_summary(terminalreporter):
    reports = [r for r in terminalreporter.stats.get("skipped", []) if "gpu" in r.keywords]
    ran = sum("gpu" in r.keywords for r in terminalreporter.stats.get("passed", []))
    reasons = Counter(
        r.longrepr[2].removeprefix("Skipped: ") for r in reports if isinstance(r.longrepr, tuple)
    )
    terminalreporter.write_line(f"GPU tests: {ran} passed, {len(reports)} skipped")
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"  {count} skipped: {reason}")
