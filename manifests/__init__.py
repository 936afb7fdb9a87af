"""What exists and is trusted: append-only records and the SQL over them."""
