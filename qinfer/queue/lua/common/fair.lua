-- Turns of a lane's shares by start-time fair queueing (Goyal, Vin and Cheng 1996). A share's lead is its service
-- beyond the busy share furthest behind, in entries by weight; the smallest lead is next. An idle share saves nothing.

-- Returns how many of the next `count` entries each share, {lead, weight}, gets.
local function next_of(shares, count)
  local wanted, leads, all, sum, highest = {}, {}, 0, 0, 0
  for i, share in ipairs(shares) do
    wanted[i], leads[i] = 0, share.lead
    all, sum, highest = all + share.weight, sum + share.lead * share.weight, math.max(highest, share.lead)
  end
  if #shares == 1 then return {count} end
  local level = (count + sum) / all - 1 -- all leads reach it, none exceeds it
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

-- Takes up to `count` entries in turn; returns how many. `take(share, count)` returns fewer at a share's end. Leads of
-- `empty` shares shrink.
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
    if #still == #live then break end
    live = still
  end
  local least = #live > 0 and math.huge or 0
  for _, share in ipairs(live) do least = math.min(least, share.lead) end
  for _, share in ipairs(shares) do share.lead = #live > 0 and math.max(share.lead - least, 0) or 0 end
  return count - left
end
