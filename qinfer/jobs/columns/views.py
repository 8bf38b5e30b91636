"""String and binary views, which pyarrow can neither take nor filter rows of (`array_take has no kernel`), as texts."""

import pyarrow as pa


def without_views(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns a batch whose texts are of types that pyarrow can do everything with; itself where it has no views."""
    schema = schema_without_views(batch.schema)
    return batch if schema.types == batch.schema.types else batch.cast(schema)


def schema_without_views(schema: pa.Schema) -> pa.Schema:
    """Returns the columns of `without_views`."""
    return pa.schema([(field.name, _not_a_view(field.type)) for field in schema])


def _not_a_view(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if not hasattr(kind, "value_type") or (element := _not_a_view(kind.value_type)) == kind.value_type:
        return kind
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(element, kind.list_size)
    return pa.dictionary(kind.index_type, element) if pa.types.is_dictionary(kind) else pa.large_list(element)
