-- KEYS: the lanes of waiting sequences. ARGV: prefix, is_fragile.
-- Returns {tenant, weight, held by all workers, ms that the first has waited (-1 = none)} of the tenants with open
--   sequences.
begin(ARGV[1], ARGV[2])
local found = {}
for i, share in ipairs(shares_of(KEYS)) do
  found[i] = {share.tenant, share.weight, share.held, share.since and math.max(now - share.since, 0) or -1}
end
return found
