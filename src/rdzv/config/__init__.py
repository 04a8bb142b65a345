"""What a user may set: settings and their types, endpoints, and the shared secret. The only place that validates them.

May import `core` (for the record of the settings that a run agreed on) and `errors`.
"""
