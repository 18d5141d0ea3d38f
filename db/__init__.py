"""Keep what was measured: profiles, tables, designs, runs and jobs, in SQLite or PostgreSQL.

`db.location` says where the database is without loading SQLAlchemy, so that a search that needs none stays quick;
import the other modules only once there is something to open.
"""
