"""The tests of test_public_reports.py's table, by subject; a test has the number of its report in its name."""
