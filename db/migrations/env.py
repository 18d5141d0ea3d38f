"""Run the migrations on the connection, and inside the transaction, that `db.schema` hands over."""

from alembic import context

from db.schema import VERSION_TABLE
from db.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    version_table=VERSION_TABLE,
    render_as_batch=True,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
