"""What a user holds: a target, its strategies, and the requests that they answer."""
