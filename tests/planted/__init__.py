"""Plants bugs one at a time and checks that the tests fail: `python -m tests.planted`."""
