-- Tells of which tenants sequences are open. KEYS: the lanes in which they wait for an owner. ARGV: partition's prefix, whether Redis may lose.
-- Returns {tenant, its weight, how many workers have, how long the first one has waited in ms (-1 = none does)} of each.
begin(ARGV[1], ARGV[2])
local found = {}
for i, share in ipairs(shares_of(KEYS)) do
  found[i] = {share.tenant, share.weight, share.held, share.since and math.max(now - share.since, 0) or -1}
end
return found
