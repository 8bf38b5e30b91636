-- Turns of the shares of a lane: start-time fair queueing (Goyal, Vin and Cheng 1996) of entries that all cost the same. A share's lead is
-- the service that it had beyond the share furthest behind that had work, in entries by weight. The next entry is of the share with
-- the smallest lead. Who had no work saves nothing up: its lead never is below 0.

-- Decides of which shares the next `count` entries are. `shares`: a list of {lead, weight}, all with work. Returns how many of each.
local function next_of(shares, count)
  local wanted, leads, all, sum, highest = {}, {}, 0, 0, 0
  for i, share in ipairs(shares) do
    wanted[i], leads[i] = 0, share.lead
    all, sum, highest = all + share.weight, sum + share.lead * share.weight, math.max(highest, share.lead)
  end
  if #shares == 1 then return {count} end
  local level = (count + sum) / all - 1 -- all leads reach it, and none is beyond: what is left are a few turns
  if level > highest then
    for i, share in ipairs(shares) do
      wanted[i] = math.floor((level - share.lead) * share.weight)
      leads[i] = share.lead + wanted[i] / share.weight
      count = count - wanted[i]
    end
  end
  for _ = 1, count do
    local first = 1
    for i = 2, #shares do
      if leads[i] < leads[first] then first = i end
    end
    wanted[first] = wanted[first] + 1
    leads[first] = leads[first] + 1 / shares[first].weight
  end
  return wanted
end

-- Takes up to `count` entries of shares in turn, and keeps their leads. `take(share, count)` takes up to so many of one, and returns how
-- many: fewer where it has no more. Those that are `empty` are not asked; their leads shrink. Returns how many were taken.
local function take_in_turn(shares, count, take)
  local live, left = {}, count
  for _, share in ipairs(shares) do
    if not share.empty then live[#live + 1] = share end
  end
  while left > 0 and #live > 0 do
    local wanted, still = next_of(live, left), {}
    for i, share in ipairs(live) do
      local got = wanted[i] > 0 and take(share, wanted[i]) or 0
      share.lead = share.lead + got / share.weight
      left = left - got
      if got == wanted[i] then still[#still + 1] = share end
    end
    if #still == #live then break end -- all gave what was wanted, which is all
    live = still
  end
  local least = #live > 0 and math.huge or 0
  for _, share in ipairs(live) do least = math.min(least, share.lead) end
  for _, share in ipairs(shares) do share.lead = #live > 0 and math.max(share.lead - least, 0) or 0 end
  return count - left
end
