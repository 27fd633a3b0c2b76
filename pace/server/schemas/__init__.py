"""What a request may say, one file for each kind of request (pydantic)."""
