"""The configuration of a member: settings and their types, endpoints, the shared secret. The only place that validates them.

May import `core` (for the record of the settings that a run agreed on) and `errors`.
"""
