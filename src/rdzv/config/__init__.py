"""The configuration of a member: settings and their types, endpoints, the shared secret. All validation is here.

May import `core` (for the record of the settings that a run agreed on) and `errors`.
"""
