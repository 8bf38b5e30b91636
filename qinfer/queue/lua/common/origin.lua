-- Adds the fields by which `move.lua` finds an entry: endpoint, tenant, id of a request with a record.
local function mark_origin(fields, endpoint, tenant, request)
  if endpoint == '' then return end
  for _, pair in ipairs({{'e', endpoint}, {'t', tenant}, {'r', request}}) do
    if pair[2] ~= '' then fields[#fields + 1], fields[#fields + 2] = pair[1], pair[2] end
  end
end
